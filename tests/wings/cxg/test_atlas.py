"""CXG in the atlas and on the command line: added, queried, written, converted in every direction."""

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from raggedatlas import RaggedAtlas
from raggedatlas.cli.commands import app
from raggedatlas.errors import SourceError
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.wings.cxg.inspection import detect
from reading import dense, read_element
from support import cxg_files
from support.atlases import small_anndata
from support.cxg_files import VALUES, write_cxg


def ask(*words: object) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.long
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
    order = given.var_names.get_indexer(list(cxg_files.VAR["name_0"]))
    np.testing.assert_array_equal(dense(given.X)[:, order], VALUES[2:])
    np.testing.assert_array_equal(given.obsm["X_umap"], cxg_files.EMBEDDINGS["umap"][2:])
    back = view.dataset("small").to_anndata()
    np.testing.assert_array_equal(dense(back.X), VALUES)
    assert back.uns["title"] == "Small"
    made = view.dataset("small").write(tmp_path / "again.cxg")
    assert read_element(made, "obs")["sample"].tolist() == ["a", "ä", "", "b", "b", "a"]
    np.testing.assert_array_equal(dense(read_element(made, "X")), VALUES)


def test_a_damaged_cxg_leaves_no_trace(tmp_path: Path) -> None:
    """A CXG that is refused leaves the atlas as it was."""
    path = write_cxg(tmp_path / "small.cxg")
    entry = (np.array([0]), np.array([99], np.uint32), np.array([1], np.float32))
    cxg_files.write_half(path / "Xr", "obs", 6, entry)
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    with pytest.raises(SourceError, match="C20"):
        atlas.add(path)
    assert len(atlas.list_datasets()) == 0


@pytest.mark.nightly
def test_three_real_runs_become_one_cxg(tmp_path: Path, data_dir: Path) -> None:
    """Real 10x runs with different cells and features, one atlas, one query, one CXG: cells, counts and columns are those of the query."""
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    atlas.add([data_dir / run for run in ("lung_C144.h5", "lung_C149.h5", "pbmc_5k_protein_v3.h5ad")])
    atlas.snapshot()
    query = RaggedAtlas.checkout_latest(tmp_path / "atlas").query()
    made = query.write(str(tmp_path / "lung.cxg"), compute_embedding="pca", title="Lung")
    expected = query.to_anndata()
    assert detect(Path(made)).layout == "split"
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


@pytest.mark.long
def test_the_command_converts_to_and_fro(given: Path, tmp_path: Path) -> None:
    """h5ad to CXG with profile and title, and on to Zarr and h5ad, whole and in part; what changes is told on stderr."""
    words = ["--strict", "--profile", "0.2.0", "--title", "Mine", "--about", "https://a.b"]
    said = ask("convert", given, tmp_path / "a.cxg", *words)
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


@pytest.mark.nightly
def test_the_command_computes_an_embedding(tmp_path: Path, data_dir: Path) -> None:
    """A 10x file has no embedding: refused with the way out, and written with one."""
    run = data_dir / "lung_C144.h5"
    refused = ask("convert", run, tmp_path / "a.cxg")
    assert refused.exit_code == 1
    assert "C22" in refused.stderr
    assert "--compute-embedding pca" in refused.stderr
    assert not (tmp_path / "a.cxg").exists()
    assert ask("convert", run, tmp_path / "a.cxg", "--compute-embedding", "pca").exit_code == 0
    assert detect(tmp_path / "a.cxg").embeddings == ("pca",)


def test_the_command_refuses_what_would_be_lost(given: Path, tmp_path: Path, data_dir: Path) -> None:
    """With --strict a file that a CXG does not hold is refused, with exit code 1; options of a CXG for another target are a fault of usage."""
    refused = ask("convert", data_dir / "pbmc68k_reduced.h5ad", tmp_path / "a.cxg", "--strict")
    assert refused.exit_code == 1
    assert "lost: obsp/connectivities" in refused.stderr
    assert not (tmp_path / "a.cxg").exists()
    said = ask("convert", given, tmp_path / "a.zarr", "--strict", "--title", "x")
    assert said.exit_code == 2
    assert "--title: only for a .cxg" in " ".join(said.stderr.replace("│", " ").split())


@pytest.mark.long
def test_the_command_has_the_choices_of_the_library(given: Path, tmp_path: Path) -> None:
    """Layout, matrix, embeddings, shown names, sorted categories and wide integers can be chosen on the command line."""
    adata = ad.read_h5ad(given)
    adata.layers["twice"] = adata.X * 2
    adata.obs["wide"] = np.arange(adata.n_obs) + 2**40
    adata.obs["kind"] = pd.Categorical(["z", "a"] * (adata.n_obs // 2) + ["z"] * (adata.n_obs % 2), ["z", "a"])
    adata.var["other"] = [f"other {i}" for i in range(adata.n_vars)]
    adata.obsm["X_second"] = adata.obsm["X_umap"] + 1
    adata.write_h5ad(tmp_path / "all.h5ad")
    refused = ask("convert", tmp_path / "all.h5ad", tmp_path / "a.cxg")
    assert refused.exit_code == 1
    assert "C28: obs column 'wide'" in refused.stderr
    words = ["--sparse", "--x", "layers/twice", "--embedding", "X_second", "--var-index", "other", "--sort-categories"]
    said = ask("convert", tmp_path / "all.h5ad", tmp_path / "a.cxg", *words, "--wide-integers", "text")
    assert said.exit_code == 0, said.stderr
    found = detect(tmp_path / "a.cxg")
    assert (found.layout, found.embeddings) == ("split", ("second",))
    source = open_source(tmp_path / "a.cxg")
    np.testing.assert_array_equal(dense(source.element("X")), dense(adata.layers["twice"]))
    assert list(source.element("obs")["kind"].cat.categories) == ["a", "z"]
    assert source.element("obs")["wide"].tolist() == [str(2**40 + i) for i in range(adata.n_obs)]
    np.testing.assert_array_equal(
        dense(source.columns(["other 1"]))[:, 0],
        dense(adata.layers["twice"])[:, 1],  # type: ignore[attr-defined]
    )
    source.close()
    assert ask("convert", given, tmp_path / "b.cxg", "--sparse-below", "0").exit_code == 0
    assert detect(tmp_path / "b.cxg").layout == "dense"
    said = ask("convert", given, tmp_path / "c.h5ad", "--dense", "-e", "X_umap")
    assert said.exit_code == 2
    assert "--dense or --sparse, --embedding: only for a .cxg" in " ".join(said.stderr.replace("│", " ").split())


def test_the_command_reads_what_it_is_told_to(tmp_path: Path) -> None:
    """A version that is not known, and uns that is not to be read, are told on the command line, as the refusals say."""
    path = write_cxg(tmp_path / "a.cxg")
    cxg_files.set_meta(path / "cxg_group_metadata", cxg_version="0.4.0")
    cxg_files.set_meta(path / "uns", spatial=b"pickled")
    for words, way in (((), "--cxg-version"), (("--cxg-version", "0.3.0"), "--no-uns")):
        refused = ask("convert", path, tmp_path / "a.h5ad", *words)
        assert refused.exit_code == 1
        assert way in refused.stderr
    assert ask("convert", path, tmp_path / "a.h5ad", "--cxg-version", "0.3.0", "--no-uns").exit_code == 0
    np.testing.assert_array_equal(dense(ad.read_h5ad(tmp_path / "a.h5ad").X), VALUES)
    assert ask("convert", tmp_path / "a.h5ad", tmp_path / "b.h5ad", "--no-uns").exit_code == 1


@pytest.mark.long
def test_a_snapshot_is_exported_by_command(given: Path, tmp_path: Path) -> None:
    """Export writes cells of a snapshot as a CXG, with the embedding that their datasets have."""
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(given)
    atlas.snapshot()
    said = ask("export", tmp_path / "atlas", tmp_path / "b.cxg", "--where", "cell_type = 'B'", "--title", "B cells")
    assert said.exit_code == 0, said.stderr
    cells = ad.read_h5ad(given).obs.query("cell_type == 'B'")
    assert sorted(read_element(tmp_path / "b.cxg", "obs")["cell_name"]) == sorted(cells.index)
    assert read_element(tmp_path / "b.cxg", "uns/title") == "B cells"


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
