"""CXG in the atlas and on the command line: added, queried, written, converted in every direction."""

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from typer.testing import CliRunner

from raggedatlas import RaggedAtlas
from raggedatlas.cli import app
from raggedatlas.errors import SourceError
from raggedatlas.formats.copying import copy
from raggedatlas.formats.cxg.detecting import detect
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.testing import cxgs
from raggedatlas.testing.annotated import small_anndata
from raggedatlas.testing.cxgs import VALUES, write_cxg

pytest.importorskip("tiledb")
# anndata 0.13 asks pandas 3 for options that pandas 3 deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"
)


def dense(matrix: Any) -> Any:
    return matrix.toarray() if sp.issparse(matrix) else np.asarray(matrix)


def ask(*words: object) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("form", ["split", "sparse"])
def test_a_cxg_is_added_and_given_back(tmp_path: Path, form: Any) -> None:
    """A CXG in an atlas has its cells, categories, values and embeddings, and comes back as AnnData and as CXG."""
    path = write_cxg(tmp_path / "small.cxg", form)
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    report = atlas.add(path)
    assert (report.name, report.n_cells) == ("small", 6)
    atlas.snapshot()
    view = RaggedAtlas.checkout_latest(tmp_path / "atlas")
    given = view.query().where("n_counts >= 2").to_anndata()
    assert given.obs["cell_name"].tolist() == [f"cell {i}" for i in range(2, 6)]
    order = given.var_names.get_indexer(list(cxgs.VAR["name_0"]))
    np.testing.assert_array_equal(dense(given.X)[:, order], VALUES[2:])
    np.testing.assert_array_equal(given.obsm["X_umap"], cxgs.EMBEDDINGS["umap"][2:])
    back = view.dataset("small").to_anndata()
    np.testing.assert_array_equal(dense(back.X), VALUES)
    assert back.uns["title"] == "Small"
    made = view.dataset("small").write(tmp_path / "again.cxg")
    source = open_source(made)
    assert source.element("obs")["sample"].tolist() == ["a", "ä", "", "b", "b", "a"]
    np.testing.assert_array_equal(dense(source.element("X")), VALUES)


def test_a_damaged_cxg_leaves_no_trace(tmp_path: Path) -> None:
    """A CXG that is refused leaves the atlas as it was."""
    path = write_cxg(tmp_path / "small.cxg")
    entry = (np.array([0]), np.array([99], np.uint32), np.array([1], np.float32))
    cxgs.write_half(path / "Xr", "obs", 6, entry)
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    with pytest.raises(SourceError, match="C20"):
        atlas.add(path)
    assert len(atlas.list_datasets()) == 0


def test_three_real_runs_become_one_cxg(tmp_path: Path, data_dir: Path) -> None:
    """Real 10x runs with different cells and features, one atlas, one query, one CXG: cells, counts and columns are those of the query."""
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    for run in ("lung_C144.h5", "lung_C149.h5", "pbmc_5k_protein_v3.h5ad"):
        atlas.add(data_dir / run)
    atlas.snapshot()
    query = RaggedAtlas.checkout_latest(tmp_path / "atlas").query()
    with pytest.raises(SourceError, match=r"^C22: "):
        query.write(str(tmp_path / "lung.cxg"))
    made = query.write(str(tmp_path / "lung.cxg"), compute_embedding="pca", title="Lung")
    expected = query.to_anndata()
    assert detect(made).layout == "split"
    source = open_source(made)
    back = source.element("X")
    assert (back != expected.X).nnz == 0
    obs = source.element("obs")
    assert list(obs.index) == list(expected.obs_names)
    assert obs["dataset"].tolist() == expected.obs["dataset"].astype(str).tolist()
    assert obs["dataset"].nunique() == 3
    assert list(source.element("var").index) == list(expected.var_names)
    assert np.isfinite(source.element("obsm/X_pca")).all()
    assert source.element("uns/atlas")["uri"] == expected.uns["atlas"]["uri"]
    wanted = [5, 0, 77]
    np.testing.assert_array_equal(dense(source.columns(wanted)), dense(expected.X[:, wanted]))  # type: ignore[attr-defined]
    source.close()


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A small file with an embedding."""
    adata = small_anndata(0)
    adata.obsm["X_umap"] = np.arange(2 * adata.n_obs, dtype=np.float32).reshape(-1, 2)
    adata.write_h5ad(tmp_path / "in.h5ad")
    return tmp_path / "in.h5ad"


def test_the_command_converts_to_and_fro(given: Path, tmp_path: Path) -> None:
    """h5ad to CXG with profile and title, and on to Zarr and h5ad, whole and in part; what changes is told on stderr."""
    said = ask(
        "convert",
        given,
        tmp_path / "a.cxg",
        "--strict",
        "--profile",
        "0.2.0",
        "--title",
        "Mine",
        "--about",
        "https://a.b",
    )
    assert said.exit_code == 0, said.stderr
    assert "converted: obs/n_genes" in said.stderr
    assert said.stdout.strip() == f"Wrote {tmp_path / 'a.cxg'}"
    found = detect(tmp_path / "a.cxg")
    assert (found.version, found.layout) == ("0.2.0", "dense")
    assert ask("convert", tmp_path / "a.cxg", tmp_path / "b.zarr").exit_code == 0
    part = ask("convert", tmp_path / "b.zarr", tmp_path / "c.h5ad", "-w", "cell_type = 'B'", "-f", "GENE3")
    assert part.exit_code == 0, part.stderr
    back, source = ad.read_h5ad(tmp_path / "c.h5ad"), ad.read_h5ad(given)
    chosen = source[source.obs["cell_type"] == "B", ["GENE3"]]
    np.testing.assert_array_equal(dense(back.X), dense(chosen.X))
    np.testing.assert_array_equal(back.obsm["X_umap"], chosen.obsm["X_umap"])
    assert back.uns["title"] == "Mine"


def test_the_command_tells_in_json(given: Path, tmp_path: Path) -> None:
    """With --json the losses stand in the one document, and nothing is said beside it."""
    said = ask("convert", given, tmp_path / "a.cxg", "--json")
    assert said.exit_code == 0, said.stderr
    told = json.loads(said.stdout)
    assert told["path"] == str(tmp_path / "a.cxg")
    assert {"key": "obs/n_genes", "fate": "converted", "what": "int64 is written as int32"} in told["losses"]


def test_the_command_computes_an_embedding(tmp_path: Path, data_dir: Path) -> None:
    """A 10x file has no embedding: refused with the way out, and written with one."""
    run = data_dir / "lung_C144.h5"
    refused = ask("convert", run, tmp_path / "a.cxg")
    assert refused.exit_code == 1
    assert "C22" in refused.stderr
    assert "compute_embedding='pca'" in refused.stderr
    assert not (tmp_path / "a.cxg").exists()
    assert ask("convert", run, tmp_path / "a.cxg", "--compute-embedding", "pca").exit_code == 0
    assert detect(tmp_path / "a.cxg").embeddings == ("pca",)


def test_the_command_refuses_what_would_be_lost(tmp_path: Path, data_dir: Path) -> None:
    """With --strict a file that a CXG does not hold is refused in one line, with exit code 1."""
    refused = ask("convert", data_dir / "pbmc68k_reduced.h5ad", tmp_path / "a.cxg", "--strict")
    assert refused.exit_code == 1
    assert "lost: obsp/connectivities" in refused.stderr
    assert not (tmp_path / "a.cxg").exists()


def test_options_of_a_cxg_are_for_a_cxg(given: Path, tmp_path: Path) -> None:
    """Options of a CXG for another target are a fault of usage."""
    said = ask("convert", given, tmp_path / "a.zarr", "--strict", "--title", "x")
    assert said.exit_code == 2
    assert "--strict, --title are options of a .cxg" in " ".join(said.stderr.replace("│", " ").split())


def test_a_snapshot_is_exported_by_command(given: Path, tmp_path: Path) -> None:
    """Export writes cells of a snapshot as a CXG, with the embedding that their datasets have."""
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(given)
    atlas.snapshot()
    said = ask("export", tmp_path / "atlas", tmp_path / "b.cxg", "--where", "cell_type = 'B'", "--title", "B cells")
    assert said.exit_code == 0, said.stderr
    source = open_source(tmp_path / "b.cxg")
    cells = ad.read_h5ad(given).obs.query("cell_type == 'B'")
    assert sorted(source.element("obs")["cell_name"]) == sorted(cells.index)
    assert source.element("uns/title") == "B cells"


def test_one_modality_becomes_a_cxg(tmp_path: Path, data_dir: Path) -> None:
    """Of a MuData one modality is chosen; without a choice the refusal says so."""
    pytest.importorskip("mudata")
    path = data_dir / "wu2020.h5mu"
    with pytest.raises(SourceError, match="modality="):
        copy(path, open_sink(tmp_path / "a.cxg", compute_embedding="pca"))
    made = copy(path, open_sink(tmp_path / "a.cxg", compute_embedding="pca"), modality="gex")
    source = open_source(path)
    assert open_source(made).describe().n_cells == len(source.element("mod/gex/obs"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.cxg"]
