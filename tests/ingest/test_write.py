"""Laws of the write protocol: all or nothing, nothing twice, and nothing of a source missing from the report."""

import errno
import gc
import os
import shutil
import subprocess
from pathlib import Path
from threading import Event

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog.catalog import CELLS
from raggedatlas.errors import DuplicateError, SourceError, StoreError, ValuesError
from raggedatlas.ingest import add as adding
from raggedatlas.store import location
from raggedatlas.store.tables import Tables
from raggedatlas.store.upkeep import MANY_FRAGMENTS
from support.anndata_strategies import assert_same
from support.atlases import small_anndata


def plain(seed: int = 0, n: int = 12) -> ad.AnnData:
    rng = np.random.default_rng(seed)
    obs = pd.DataFrame({"n": rng.integers(0, 9, n)}, index=[f"c{i}" for i in range(n)])
    return ad.AnnData(
        sp.csr_matrix(rng.poisson(1, (n, 5)).astype(np.float32)), obs=obs, var=pd.DataFrame(index=list("vwxyz"))
    )


def groups(atlas: RaggedAtlas) -> set[str]:
    return {name for name in atlas._catalog.arrays.list_children() if name != "zarr.json"}


def elements_of(file: Path) -> set[str]:
    """Every element of an AnnData file but X, obs and var, as h5py lists them."""
    with h5py.File(file) as f:
        found = {f"{g}/{k}" for g in ("layers", "obsm", "obsp", "varm", "varp", "uns") for k in f.get(g, ())}
        return found | {"X"} | ({"raw/X"} if "raw" in f else set())


@pytest.mark.parametrize("name", ["pbmc68k_reduced", "pbmc_10k_protein_v3", "pbmc_5k_protein_v3"])
@pytest.mark.filterwarnings("ignore:Element '.*' was written without")
def test_a_real_file_comes_back_and_nothing_is_dropped_silently(atlas, data_dir, name) -> None:  # noqa: ANN001
    """X, layers, raw, obs and var come back; every obs column and every other element stands in the report."""
    file = data_dir / f"{name}.h5ad"
    given = ad.read_h5ad(file)
    spaces = {"obsm/protein_expression": "protein_abundance"} if "protein" in name else {}
    report = atlas.add(file, spaces=spaces, progress=False)
    assert_same(given, atlas.dataset(name).to_anndata())
    assert {c.name for c in report.columns} == set(given.obs.columns)
    assert {e.name for e in report.elements} >= elements_of(file)
    for element in report.elements:
        assert element.stored_as or (element.fate == "left out" and element.note)
    if spaces:
        proteins = atlas.dataset(name).to_anndata("protein_abundance").X
        np.testing.assert_array_equal(proteins, np.asarray(given.obsm["protein_expression"]))


def test_a_memory_object_reports_everything_too(atlas) -> None:  # noqa: ANN001
    """obsm, varm, obsp, varp, uns and raw of an object in memory stand in the report."""
    given = plain()
    given.obsm["pca"], given.varm["pcs"] = np.ones((12, 2)), np.ones((5, 2))
    given.obsp["near"], given.varp["corr"] = sp.eye(12, format="csr"), np.ones((5, 5))
    given.uns["u"] = {"a": 1}
    given.layers["twice"] = given.X * 2
    given.raw = plain(1)
    report = atlas.add(given, "d", progress=False)
    assert {(e.name, e.fate) for e in report.elements} == {
        ("X", "cast"), ("layers/twice", "cast"), ("raw/X", "cast"), ("obsm/pca", "kept"), ("varm/pcs", "kept"),
        ("obsp/near", "kept"), ("varp/corr", "kept"), ("uns/u", "kept"),
    }  # fmt: skip
    assert atlas.dataset("d").left_out == {}
    less = atlas.add(plain(2), "less", progress=False, extras=[])
    assert {e.name for e in less.elements} == {"X"}


@pytest.mark.long
def test_one_row_per_cell_and_a_pointer_per_modality(atlas, data_dir) -> None:  # noqa: ANN001
    """A MuData gives one row per cell; a modality that a cell lacks is null; its rows come back with their own cells."""
    report = atlas.add(data_dir / "wu2020.h5mu", spaces={"mod/gex/obsm/X_umap_orig": "embedding"}, progress=False)
    rows = atlas._catalog.tables.read("cells")
    assert report.n_cells == rows.num_rows == 110
    assert rows.column("gene_expression").null_count == rows.column("embedding").null_count == 50
    with h5py.File(data_dir / "wu2020.h5mu") as f:
        names = f["mod/gex/obs"][f["mod/gex/obs"].attrs["_index"]].asstr()[:]
        x = f["mod/gex/X"]
        expected = sp.csr_matrix((x["data"][:], x["indices"][:], x["indptr"][:]), shape=x.attrs["shape"])
        umap = f["mod/gex/obsm/X_umap_orig"][:]
    back = atlas.dataset("wu2020").to_anndata()
    assert back.obs_names.tolist() == names.tolist()
    assert (expected != back.X).nnz == 0
    np.testing.assert_array_equal(atlas.dataset("wu2020").to_anndata("embedding").X, umap)
    assert [p for p in atlas.validate("rows") if p.rule != "unassigned-index"] == []


@pytest.mark.filterwarnings("ignore:From 0.4", "ignore:The inplace keyword")
def test_modalities_in_another_order_keep_their_cells(atlas) -> None:  # noqa: ANN001
    """A modality whose cells stand in another order than the global ones is tied to the right cells."""
    mudata = pytest.importorskip("mudata")
    rna, adt = plain(0, 6), plain(1, 4)
    adt = adt[::-1].copy()
    adt.var_names = list("pqrst")
    given = mudata.MuData({"rna": rna, "adt": adt})
    atlas.add(given, "d", progress=False)
    back = atlas.dataset("d").to_anndata("protein_abundance")
    assert back.obs_names.tolist() == adt.obs_names.tolist()
    np.testing.assert_array_equal(np.asarray(back.X.todense() if sp.issparse(back.X) else back.X), adt.X.toarray())
    rows = atlas._catalog.tables.read("cells", ["cell_name", "protein_abundance"]).to_pylist()
    position = {r["cell_name"]: r["protein_abundance"] and r["protein_abundance"]["position"] for r in rows}
    assert position == {name: adt.obs_names.get_loc(name) if name in adt.obs_names else None for name in rna.obs_names}


def test_the_same_content_is_known_again(atlas, unchanged, tmp_path) -> None:  # noqa: ANN001
    """The same cells, features and values are recognised under another name, in another form, from a file."""
    given = plain()
    atlas.add(given, "d", progress=False)
    given.write_h5ad(tmp_path / "other.h5ad")
    dense = given.copy()
    dense.X = given.X.toarray()
    for again in (given, tmp_path / "other.h5ad", dense):
        with unchanged(atlas), pytest.raises(DuplicateError, match="'d'"):
            atlas.add(again, "e", progress=False)
        with unchanged(atlas):
            assert atlas.add(again, "e", on_duplicate="skip", progress=False).status == "skipped"


def test_blocks_make_no_difference_to_the_hash(tmp_path, monkeypatch) -> None:  # noqa: ANN001
    """However large the steps, a file has one content hash."""
    hashes = set()
    for rows in (1, 5, 1000):
        monkeypatch.setattr("raggedatlas.ingest.group_writer.block_rows", lambda info, rows=rows: rows)
        hashes.add(RaggedAtlas.create(str(tmp_path / str(rows))).add(plain(), "d", progress=False).content_hash)
    assert len(hashes) == 1


def test_replace_puts_the_new_in_place_of_the_old(atlas, unchanged) -> None:  # noqa: ANN001
    """on_duplicate='replace' replaces by content and by name; without it a taken name is refused."""
    atlas.add(plain(), "d", progress=False)
    with unchanged(atlas), pytest.raises(DuplicateError, match="called 'd' already"):
        atlas.add(plain(1), "d", progress=False)
    assert atlas.add(plain(1), "d", on_duplicate="replace", progress=False).status == "replaced"
    assert atlas.add(plain(1), "renamed", on_duplicate="replace", progress=False).status == "replaced"
    assert atlas.list_datasets()["name"].tolist() == ["renamed"]
    assert_same(plain(1), atlas.dataset("renamed").to_anndata())
    assert atlas._catalog.tables.read("cells").num_rows == 12


def test_names_in_memory_never_clash(atlas) -> None:  # noqa: ANN001
    """Sources without a name of their own get different ones, also within one call."""
    atlas.add(plain(), progress=False)
    reports = atlas.add([plain(1), plain(2)], progress=False)
    names = atlas.list_datasets()["name"]
    assert names.is_unique
    assert len(names) == 3
    assert all(note.startswith("the name") for r in reports for note in r.notes if "taken" in note)


def test_what_is_not_read_of_a_folder_is_in_the_report(atlas, tmp_path) -> None:  # noqa: ANN001
    """Files that nothing reads, and folders, are named once."""
    folder = tmp_path / "files"
    (folder / "more").mkdir(parents=True)
    (folder / "tree.swc").touch()
    for seed, name in enumerate(("a", "b")):
        plain(seed).write_h5ad(folder / f"{name}.h5ad")
    first, second = atlas.add(folder, progress=False)
    assert [note for note in first.notes if "left out" in note] == [
        "of the folder, more, tree.swc are left out: no files of cells; add others by their own path"
    ]
    assert not any("left out" in note for note in second.notes)


@pytest.mark.parametrize("choice", ["error", "skip", "replace"])
def test_a_folder_with_a_bad_file_and_a_repeated_one(atlas, tmp_path, choice) -> None:  # noqa: ANN001
    """The good files of a folder go in; bad ones and, unless skipped, repeated ones are named in one error."""
    plain(0).write_h5ad(tmp_path / "a.h5ad")
    plain(0).write_h5ad(tmp_path / "b.h5ad")
    plain(1).write_h5ad(tmp_path / "c.h5ad")
    (tmp_path / "broken.h5ad").write_bytes(b"not HDF5")
    with pytest.raises(SourceError, match=r"broken\.h5ad") as caught:
        atlas.add(tmp_path, on_duplicate=choice, progress=False)
    assert ("b.h5ad" in str(caught.value)) == (choice == "error")
    assert atlas.list_datasets()["name"].tolist() == ["a", "c"]
    assert groups(atlas) == set(atlas.list_datasets().index)
    assert_same(plain(1), atlas.dataset("c").to_anndata())


def test_dry_run_writes_nothing_and_says_the_same(atlas, unchanged) -> None:  # noqa: ANN001
    """dry_run gives the report of the real run but for status and the uids that it has not drawn."""
    given = plain()
    given.layers["half"] = given.X * 0.5
    given.obs["percent.mt"] = 0.5
    with unchanged(atlas):
        dry = atlas.add(given, "d", dry_run=True, progress=False)
    real = atlas.add(given, "d", progress=False)
    told, done = dry.to_dict(), real.to_dict()
    assert told.pop("status") == "dry run"
    assert done.pop("status") == "added"
    for report in (told, done):
        report.pop("dataset_uid")
        report["spaces"] = [{k: v for k, v in s.items() if k != "group"} for s in report["spaces"]]
    assert told == done
    bad = plain(1)
    bad.X.data[3] = np.nan
    with unchanged(atlas), pytest.raises(ValuesError):
        atlas.add(bad, "e", dry_run=True, progress=False)


def test_a_new_space_may_come_later(atlas) -> None:  # noqa: ANN001
    """A feature space that comes with a later file is null for earlier cells."""
    atlas.add(plain(), "d", progress=False)
    later = plain(1)
    later.obsm["p"] = pd.DataFrame(np.ones((12, 2), np.int64), index=later.obs_names, columns=["CD3", "CD4"])
    atlas.add(later, "e", spaces={"obsm/p": "protein_abundance"}, progress=False)
    pointer = atlas._catalog.tables.read("cells").column("protein_abundance")
    assert pointer.is_null().to_pylist() == [True] * 12 + [False] * 12


@pytest.mark.parametrize("after", range(5))
def test_a_full_disk_leaves_the_atlas_as_it_was(atlas, unchanged, monkeypatch, after) -> None:  # noqa: ANN001
    """When no more bytes can be written to the Zarr store, the error says where, and the group is removed."""
    atlas.add(plain(), "d", progress=False)
    original, calls = location.write_file, []

    def full(*args, **kwargs):  # noqa: ANN002, ANN202
        calls.append(args[0])
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    with unchanged(atlas), monkeypatch.context() as patch:
        patch.setattr(location, "write_file", full)
        with pytest.raises(StoreError, match="No space left"):
            atlas.add(plain(1), "e", progress=False)
    assert_same(plain(), atlas.dataset("d").to_anndata())


@pytest.mark.parametrize("table", ["gene_expression_registry", "_feature_layouts", "cells", "datasets"])
def test_a_disk_that_fills_up_at_a_table_leaves_nothing_visible(atlas, monkeypatch, table) -> None:  # noqa: ANN001
    """When a table cannot be written, no cell, dataset or group of the source stays, and adding it again works."""
    atlas.add(plain(), "d", progress=False)
    new = plain(1)
    new.var_names = list("vwabc")

    def full(name):  # noqa: ANN001, ANN202
        original = getattr(Tables, name)

        def call(self, at, *args, **kwargs):  # noqa: ANN001, ANN002, ANN202
            if at == table:
                raise StoreError(f"{at}: No space left on device.")
            return original(self, at, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("append", "append_alone", "merge"):
            patch.setattr(Tables, name, full(name))
        with pytest.raises(StoreError, match="No space left"):
            atlas.add(new, "e", progress=False)
    assert atlas.list_datasets()["name"].tolist() == ["d"]
    assert groups(atlas) == set(atlas.list_datasets().index)
    assert atlas._catalog.tables.read("cells").num_rows == 12
    atlas.add(new, "e", progress=False)
    assert_same(new, atlas.dataset("e").to_anndata())
    assert [p for p in atlas.validate("rows") if p.rule != "unassigned-index"] == []


def test_what_fails_after_the_commit_is_no_failure(atlas, monkeypatch) -> None:  # noqa: ANN001
    """Once the record is written the dataset is in, even if the note of the running add cannot be taken away."""

    def full(*args, **choices) -> None:  # noqa: ANN002
        raise StoreError("No space left on device.")

    with monkeypatch.context() as patch:
        patch.setattr("raggedatlas.ingest.add.release_lease", full)
        assert atlas.add(plain(), "d", progress=False).status == "added"
    assert_same(plain(), atlas.dataset("d").to_anndata())


def test_an_interrupted_folder_leaves_nothing_behind(atlas, unchanged, tmp_path) -> None:  # noqa: ANN001
    """Ctrl-C in the second file of a folder takes the first, which is not committed yet, away again."""
    plain(0).write_h5ad(tmp_path / "a.h5ad")
    plain(1).write_h5ad(tmp_path / "b.h5ad")
    seen = []

    def stop(step: str, done: int, total: int) -> None:
        seen.append(step)
        if seen.count("arrays") == 2:
            raise KeyboardInterrupt

    with unchanged(atlas), pytest.raises(KeyboardInterrupt):
        atlas.add(tmp_path, progress=stop)


@pytest.mark.parametrize("step", ["columns", "features", "layouts", "cells"])
def test_an_interrupted_commit_leaves_nothing_visible(atlas, monkeypatch, step) -> None:  # noqa: ANN001
    """Ctrl-C before the record, even while the cells are being written beside, takes cells and arrays away again."""
    atlas.add(plain(), "d", progress=False)
    interrupted, append = Event(), Tables.append

    def late(self, name, rows) -> None:  # noqa: ANN001
        if name == CELLS and step in ("features", "layouts"):
            assert interrupted.wait(60)
        append(self, name, rows)

    def stop(told: str, done: int, total: int) -> None:
        if told == step:
            interrupted.set()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tables, "append", late)
        with pytest.raises(KeyboardInterrupt):
            atlas.add(plain(1), "e", progress=stop)
    assert atlas.list_datasets()["name"].tolist() == ["d"]
    assert groups(atlas) == set(atlas.list_datasets().index)
    assert atlas._catalog.tables.read("cells").num_rows == 12
    atlas.add(plain(1), "e", progress=False)
    assert_same(plain(1), atlas.dataset("e").to_anndata())


def test_a_read_only_atlas_is_refused(tmp_path) -> None:  # noqa: ANN001
    """An atlas on a read-only mount refuses an add with the place that cannot be written."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(plain(), "d", progress=False)
    target = tmp_path / "mount"
    target.mkdir()
    if os.geteuid() != 0:
        for folder in [p for p in (tmp_path / "atlas").rglob("*") if p.is_dir()]:
            folder.chmod(0o555)
        target = tmp_path
    else:
        mount = shutil.which("mount")
        if (
            not mount
            or subprocess.run(
                [mount, "--bind", "-o", "ro", tmp_path, target], capture_output=True, check=False
            ).returncode
        ):
            pytest.skip("no read-only mount can be made here")
    try:
        with pytest.raises(StoreError, match="zarr_store"):
            RaggedAtlas.open(str(target / "atlas")).add(plain(1), "e", progress=False)
        assert RaggedAtlas.open(str(target / "atlas")).list_datasets()["name"].tolist() == ["d"]
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", target], check=True)
        else:
            for folder in [p for p in (tmp_path / "atlas").rglob("*") if p.is_dir()]:
                folder.chmod(0o755)


def test_datasets_that_share_no_commit_are_all_there(atlas, monkeypatch) -> None:  # noqa: ANN001
    """However many datasets go in with one commit, each is in the atlas with its cells."""
    monkeypatch.setattr(adding, "COMMIT_DATASETS", 2)
    reports = atlas.add([plain(i, 3 + i) for i in range(5)], progress=False)
    assert sorted(atlas.list_datasets()["name"]) == sorted(r.name for r in reports)
    for i, report in enumerate(reports):
        assert_same(plain(i, 3 + i), atlas.dataset(report.name).to_anndata())


@pytest.mark.long
@pytest.mark.parametrize("copy", [True, False])
def test_what_is_committed_leaves_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: bool) -> None:
    """Names of cells and features of a source are kept until its commit, however many sources follow."""
    monkeypatch.setattr(adding, "COMMIT_DATASETS", 2)
    for i in range(12):
        plain(i, 3 + i).write_h5ad(tmp_path / f"{i:02}.h5ad")
    kept: list[int] = []

    def count(step: str, _done: int, _total: int) -> None:
        if step == "plan":
            gc.collect()
            kept.append(sum(type(one) is adding.StagedDataset for one in gc.get_objects()))

    RaggedAtlas.create(str(tmp_path / "a")).add(sorted(tmp_path.glob("*.h5ad")), copy=copy, progress=count)
    assert len(kept) == 12
    assert max(kept) <= 3


def test_duplicates_are_found_among_many_small_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many datasets of one size and one set of features, the equal one is found, without a look at the cells of each."""
    atlas = RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add([small_anndata(seed) for seed in range(1, 13)], organism="human", progress=False)
    looks: list[object] = []
    original = Tables.read

    def counting(self: Tables, name: str, *given: object, **more: object) -> object:
        looks.extend([name] if name == CELLS else [])
        return original(self, name, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Tables, "read", counting)
    with pytest.raises(DuplicateError):
        atlas.add(small_anndata(7), "again", organism="human", progress=False)
    atlas.add(small_anndata(13), "new", organism="human", progress=False)
    assert len(looks) < 8


@pytest.mark.long
def test_many_adds_leave_few_fragments_in_the_tables_that_each_reads(atlas: RaggedAtlas) -> None:
    """What `add` merges changes neither an older snapshot, nor what another writer adds between, nor the order of anything."""
    atlas.add(small_anndata(0, 4), "0", progress=False)
    view = atlas.checkout(atlas.snapshot())
    other = RaggedAtlas.open(atlas.uri)
    names = [str(i) for i in range(2 * MANY_FRAGMENTS)]
    for i in range(1, len(names)):
        genes = [f"g{i + k}" for k in range(5)]
        (atlas, other)[i % 2].add(small_anndata(i, 4, genes), names[i], progress=False)
    tables = atlas._catalog.tables
    assert max(len(tables.open(t).get_fragments()) for t in tables.names() if t != CELLS) < MANY_FRAGMENTS
    assert list(atlas.list_datasets()["name"]) == names
    assert_same(small_anndata(0, 4), view.dataset("0").to_anndata())
    assert list(view.list_datasets()["name"]) == ["0"]
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []
