"""The files of a dataset in the Zarr store: few, readable by zarr-python, and beside datasets in the form before."""

from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import raggedatlas as ra
from raggedatlas.catalog.assets import read_records
from support.atlases import small_anndata

N_CELLS = 40
SPACE = "gene_expression"


def made_file(folder: Path, name: str, seed: int = 1) -> Path:
    """Write a file with elements of every kind."""
    made = small_anndata(seed, N_CELLS)
    made.layers["half"] = made.X * 0.5
    made.obsp["near"] = sp.random(N_CELLS, N_CELLS, 0.2, "csr", np.float32, random_state=0)
    made.obsm["pca"] = np.arange(N_CELLS * 2, dtype=np.float32).reshape(-1, 2)
    made.uns["note"] = {"text": "kept"}
    made.write_h5ad(folder / f"{name}.h5ad")
    return folder / f"{name}.h5ad"


def files_of(atlas: ra.RaggedAtlas, name: str) -> set[str]:
    """Return the files of a dataset, below its folder."""
    return {key for key, _, _ in atlas._catalog.arrays.child(atlas.dataset(name).uid).list_objects()}


def sound(atlas: ra.RaggedAtlas) -> bool:
    """Return whether deep validation finds nothing wrong."""
    return not any(problem.level == "must" for problem in atlas.validate("deep"))


def assert_equal(one: ad.AnnData, other: ad.AnnData) -> None:
    from anndata.tests.helpers import assert_equal as equal

    equal(one, other, exact=True)


def test_a_dataset_is_a_file_for_each_matrix_and_three_more(tmp_path: Path) -> None:
    """What besides the matrices is small is one file, and comes back as it was."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    plain = small_anndata(0, N_CELLS)
    atlas.add(plain, "plain", progress=False)
    path = made_file(tmp_path, "full")
    atlas.add(path, "full", progress=False)
    three = {"zarr.json", "bundle.zip", f"{SPACE}/zarr.json"}
    matrices = {f"{SPACE}/csr/indices/c/0", f"{SPACE}/csr/layers/counts/c/0"}
    assert files_of(atlas, "plain") == three | matrices
    assert files_of(atlas, "full") == three | matrices | {f"{SPACE}/csr/layers/half/c/0"}
    assert_equal(atlas.dataset("full").to_anndata(), ad.read_h5ad(path))
    assert sound(atlas)


def test_arrays_of_standard_codecs_have_metadata_of_their_own(tmp_path: Path) -> None:
    """A reader that knows no consolidated metadata opens each by its path, bounds and columns too; the other checks hold as well."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"), codec="standard")
    path = made_file(tmp_path, "full")
    atlas.add(path, "full", progress=False)
    atlas.add_csc("full", space=SPACE)
    (record,) = read_records(atlas._catalog)
    group = tmp_path / "atlas" / "zarr_store" / record.zarr_group
    parts = [zarr.open_array(group / "csr" / name, mode="r")[:] for name in ("layers/counts", "indices", "indptr")]
    columns = zarr.open_array(group / "columns", mode="r")[:]
    by_row = sp.csr_matrix(tuple(parts), shape=(N_CELLS, len(columns))).toarray()
    assert np.array_equal(by_row[:, columns], ad.read_h5ad(path).X.toarray())
    parts = [zarr.open_array(group / "csc" / name, mode="r")[:] for name in ("layers/counts", "indices", "indptr")]
    assert np.array_equal(sp.csc_matrix(tuple(parts), shape=by_row.shape).toarray(), by_row)
    assert zarr.open_group(group, mode="r").attrs["raggedatlas"] == {"feature_space": SPACE, "kind": "sparse"}
    assert_equal(atlas.dataset("full").to_anndata(), ad.read_h5ad(path))
    assert sound(atlas)
    metadata = group / "csr" / "indices" / "zarr.json"
    metadata.write_text(metadata.read_text().replace("uint32", "uint64"))
    assert not sound(atlas)


def test_zarr_python_opens_the_group_that_a_record_names(tmp_path: Path) -> None:
    """From the root or by its path, with the arrays of the column-sorted copy; bounds and columns are in the ZIP file."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    made = small_anndata(0, N_CELLS)
    atlas.add(made, "d", progress=False)
    atlas.add_csc("d", space=SPACE)
    (record,) = read_records(atlas._catalog)
    store = tmp_path / "atlas" / "zarr_store"
    root = zarr.open_group(store, mode="r")
    with zarr.storage.ZipStore(store / record.uid / "bundle.zip", mode="r") as small:
        bounds = zarr.open_array(small, path=f"{SPACE}/csr/indptr", mode="r")[:]
        columns = zarr.open_array(small, path=f"{SPACE}/columns", mode="r")[:]
    for group in (root[record.zarr_group], zarr.open_group(store, path=record.zarr_group, mode="r")):
        assert group.attrs["raggedatlas"] == {"feature_space": SPACE, "kind": "sparse"}
        parts = [group[f"csr/{name}"][:] for name in ("layers/counts", "indices")]
        by_row = sp.csr_matrix((*parts, bounds), shape=made.shape).toarray()
        assert np.array_equal(by_row[:, columns], made.X.toarray())
        parts = [group["csc"][name][:] for name in ("layers/counts", "indices", "indptr")]
        assert np.array_equal(sp.csc_matrix(tuple(parts), shape=made.shape).toarray(), by_row)


def test_what_is_large_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in the bundle and what not, the file comes back, and nothing is found wrong."""
    path = made_file(tmp_path, "full")
    for limit in (0, 1500, 4000):
        monkeypatch.setattr("raggedatlas.store.bundle.MEMBER_BYTES", limit)
        atlas = ra.RaggedAtlas.create(str(tmp_path / f"atlas{limit}"))
        atlas.add(path, "full", progress=False)
        assert ("bundle.zip" in files_of(atlas, "full")) == (limit > 0)
        atlas.add_csc("full", space=SPACE)
        assert_equal(atlas.dataset("full").to_anndata(), ad.read_h5ad(path))
        assert sound(atlas)
        atlas.snapshot()
        atlas.sync(str(tmp_path / f"mirror{limit}"))
        assert_equal(
            ra.RaggedAtlas.open(str(tmp_path / f"mirror{limit}")).dataset("full").to_anndata(), ad.read_h5ad(path)
        )


def test_a_copy_that_was_not_recorded_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies after the group lists a copy leaves a sound atlas, to which the copy can be added."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(made_file(tmp_path, "full"), "full", progress=False)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("raggedatlas.store.tables.Tables.merge", die)
        with pytest.raises(KeyboardInterrupt):
            atlas.add_csc("full", space=SPACE, layers=["half"])
    assert (
        "csc/layers/half"
        in zarr.open_group(tmp_path / "atlas" / "zarr_store", mode="r")[atlas.dataset("full").records[0].zarr_group]
    )
    assert sound(atlas)
    atlas.add_csc("full", space=SPACE, layers=["counts"])
    atlas.add_csc("full", space=SPACE, layers=["half"])
    assert sound(atlas)
