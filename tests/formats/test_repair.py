"""A repaired copy: made whole or not at all, with values as they were."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import write_elem
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import DuplicateError, NotFoundError, SourceError, StoreError
from raggedatlas.formats.anndata import fixes, validate
from raggedatlas.formats.anndata.fixes import FIXES, repair
from raggedatlas.testing.anndata_faults import FORMS, Form, damage, put, write_good
from raggedatlas.testing.hypothesis_profile import examples


@pytest.mark.parametrize("form", FORMS)
def test_what_is_good_is_copied_as_it_is(form: Form, tmp_path: Path) -> None:
    """A file without fault is copied byte for byte."""
    good = write_good(tmp_path / "x", form)
    done = repair(good, tmp_path / "y")
    assert (done.path, done.mended, done.left) == (str(tmp_path / "y"), (), ())
    files = [good] if good.is_file() else [at for at in good.rglob("*") if at.is_file()]
    assert files
    for at in files:
        assert (tmp_path / "y" / at.relative_to(good)).read_bytes() == at.read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_there_whole_or_not_at_all(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is made, and when it is broken off, nothing stands under its name, and nothing is left beside it."""
    path = write_good(tmp_path / "x", form)
    damage(path, lambda root: root["layers/dense"].attrs.__delitem__("encoding-version"))
    seen: list[list[str]] = []

    def stopped(*_: object) -> str:
        seen.append(sorted(at.name for at in tmp_path.iterdir() if not at.name.startswith(".")))
        raise KeyboardInterrupt

    monkeypatch.setitem(FIXES, "A02", stopped)
    with pytest.raises(KeyboardInterrupt):
        repair(path, tmp_path / "y")
    assert seen == [["x"]]
    assert [at.name for at in tmp_path.iterdir()] == ["x"]


def test_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """A target that exists, the file itself, and folders and files that do not, are refused before anything is written."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    before = path.read_bytes()
    for target in (path, tmp_path):
        with pytest.raises(DuplicateError, match="exists"):
            repair(path, target)
    with pytest.raises(StoreError, match="make it first"):
        repair(path, tmp_path / "absent" / "y.h5ad")
    with pytest.raises(NotFoundError):
        repair(tmp_path / "absent.h5ad", tmp_path / "y.h5ad")
    assert [at.name for at in tmp_path.iterdir()] == ["x.h5ad"]
    assert path.read_bytes() == before


def test_a_zip_file_is_refused(tmp_path: Path) -> None:
    """A zipped folder cannot be changed, which is said before anything is copied."""
    folder = write_good(tmp_path / "x.zarr", "zarr3")
    damage(folder, lambda root: root["layers/dense"].attrs.__delitem__("encoding-version"))
    packed = shutil.make_archive(str(folder), "zip", folder)
    with pytest.raises(SourceError, match="zip file"):
        repair(packed, tmp_path / "y.zarr.zip")
    assert sorted(at.name for at in tmp_path.iterdir()) == ["x.zarr", "x.zarr.zip"]


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_mended_values_are_the_values(form: Form, tmp_path: Path) -> None:
    """After several mends at once anndata reads what it reads of the good file; metadata that were consolidated are so again."""
    good = write_good(tmp_path / "good", form)
    path = tmp_path / "bad"
    shutil.copytree(good, path) if good.is_dir() else shutil.copyfile(good, path)
    if form != "hdf5":
        with warnings.catch_warnings(action="ignore"):
            zarr.consolidate_metadata(path)
    damage(path, break_much)
    done = repair(path, tmp_path / "mended")
    assert done.left == ()
    assert {line.split()[0] for line in done.mended} >= {"A01", "A26", "A60", "A73", "A90", "A102", "A123"}
    back, given = read_as(form, tmp_path / "mended"), read_as(form, good)
    assert back.obs.drop(columns="kind").equals(given.obs.drop(columns="kind"))
    assert back.obs["kind"].tolist() == given.obs["kind"].tolist()
    assert (back.X != given.X).nnz == 0
    assert back.uns["number"] == given.uns["number"]
    assert np.array_equal(back.uns["list"], given.uns["list"])


def read_as(form: Form, path: Path) -> ad.AnnData:
    return ad.read_h5ad(path) if form == "hdf5" else ad.read_zarr(path)


def break_much(root: Any) -> None:
    del root["layers/dense"].attrs["encoding-type"], root["uns/list"].attrs["encoding-type"]
    put(root, "X/indptr", np.asarray(root["X/indptr"][...], np.uint32))
    put(root, "uns/number", np.array([3.5]))
    put(root, "obs/count/mask", np.asarray(root["obs/count/mask"][...], np.int8))
    del root["obs/kind"].attrs["ordered"]
    names = list(root["obs"].attrs["column-order"])
    root["obs"].attrs["column-order"] = [*names, names[0]]


@pytest.mark.nightly
@given(st.data())
@examples(25)
def test_entries_are_sorted_and_summed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A sorted copy is the matrix that SciPy makes of it, however it is cut; where a sum does not fit nothing changes."""
    n, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    entries = data.draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, m - 1), st.integers(1, 90)), max_size=12)
    )
    rows, columns, values = (np.array([e[i] for e in entries], dtype=int) for i in range(3))
    order = np.argsort(rows, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))])
    dtype = np.dtype(data.draw(st.sampled_from(["int8", "float32", "int64"])))
    matrix = sp.csr_matrix((values[order].astype(dtype), columns[order].astype(np.int32), indptr), shape=(n, m))
    exact = np.zeros((n, m), np.int64)
    np.add.at(exact, (rows, columns), values)
    path = tmp_path_factory.mktemp("x") / "x.h5ad"
    compression = data.draw(st.sampled_from([None, "gzip"]))
    with h5py.File(path, "w") as file:
        adata = {"obs": n, "var": m}
        for name, size in adata.items():
            group = file.create_group(name)
            group.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "i"})
            group.attrs["column-order"] = np.array([])
            write_elem(group, "i", np.array([str(k) for k in range(size)], dtype=object))
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        write_elem(file, "X", matrix, dataset_kwargs={"compression": compression} if compression else {})
    before = {problem.rule for problem in validate(path, "full")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixes, "ENTRIES", data.draw(st.sampled_from([1, 3, 1 << 20])))
        done = repair(path, path.with_name("y.h5ad"))
    fits = dtype != np.int8 or exact.max(initial=0) <= 127
    assert {problem.rule for problem in done.left} == (set() if fits else before)
    with h5py.File(path.with_name("y.h5ad")) as file:
        stored = sp.csr_matrix(tuple(file[f"X/{name}"][...] for name in ("data", "indices", "indptr")), shape=(n, m))
    assert stored.dtype == dtype
    if fits:
        assert np.array_equal(stored.toarray(), exact)
        assert stored.has_canonical_format
    else:
        assert np.array_equal(stored.indices, matrix.indices)


def write_duplicates(path: Path, **options: Any) -> None:
    """Write a file with a sparse X of 2 by 3 in which entries are unsorted and duplicate; options are those of its arrays."""
    data, indices = np.array([1, 2, 3, 4, 5], np.float32), np.array([1, 0, 1, 2, 2], np.int32)
    with warnings.catch_warnings(action="ignore"):
        ad.AnnData(sp.csr_matrix((data, indices, np.array([0, 3, 5])), shape=(2, 3))).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        for name, values in (("indices", indices), ("data", data)):
            kept = dict(file[f"X/{name}"].attrs)
            del file[f"X/{name}"]
            file["X"].create_dataset(name, data=values, **options).attrs.update(kept)


def parts(path: Path) -> list[list[float]]:
    with h5py.File(path) as file:
        assert sorted(file["X"]) == ["data", "indices", "indptr"]
        return [file[f"X/{name}"][...].tolist() for name in ("indptr", "indices", "data")]


def test_entries_behind_a_plugin_are_sorted_and_summed(tmp_path: Path) -> None:
    """Arrays of a fixed length with a plugin filter are shortened like others, and keep the filter."""
    hdf5plugin = pytest.importorskip("hdf5plugin")
    write_duplicates(tmp_path / "x", chunks=(4,), **hdf5plugin.Zstd())
    assert repair(tmp_path / "x", tmp_path / "y").left == ()
    assert parts(tmp_path / "y") == [[0, 2, 3], [0, 1, 2], [2, 4, 9]]
    with h5py.File(tmp_path / "y") as file:
        assert file["X/data"].id.get_create_plist().get_filter(0)[0] == 32015


def test_a_sort_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a later chunk cannot be read, the entries before it stay as they were, and nothing is called mended."""
    write_duplicates(tmp_path / "x", chunks=(3,), compression="gzip")
    with h5py.File(tmp_path / "x", "r+") as file:
        file["X/data"].id.write_direct_chunk((3,), b"damaged")
    monkeypatch.setattr(fixes, "ENTRIES", 1)
    done = repair(tmp_path / "x", tmp_path / "y")
    assert done.mended == ()
    assert {problem.rule for problem in done.left} == {"A00", "A59"}
    with h5py.File(tmp_path / "y") as file:
        assert sorted(file["X"]) == ["data", "indices", "indptr"]
        assert file["X/indices"][...].tolist() == [1, 0, 1, 2, 2]
        assert file["X/data"][:3].tolist() == [1, 2, 3]


def test_sums_that_overflow_are_not_made(tmp_path: Path) -> None:
    """Duplicates whose sum has no value of the type stay, of floats as of 64-bit integers."""
    for dtype, value in ((np.float32, 3e38), (np.int64, 1 << 62)):
        path = tmp_path / np.dtype(dtype).name
        write_duplicates(path)
        with h5py.File(path, "r+") as file:
            put(file, "X/data", np.full(5, value, dtype))
        done = repair(path, path.with_suffix(".y"))
        assert {problem.rule for problem in done.left} == {"A59"}
        assert parts(path.with_suffix(".y")) == parts(path)


def test_codes_that_are_no_integers_stay(tmp_path: Path) -> None:
    """Equal categories are not merged where a code is a fraction, which is none of them."""
    path = write_good(tmp_path / "x", "hdf5")
    damage(path, lambda root: put(root, "obs/kind/categories", np.array([b"a", b"a", b"b"])))
    damage(path, lambda root: put(root, "obs/kind/codes", np.array([0, 1.5, 2])))
    done = repair(path, tmp_path / "y")
    assert {problem.rule for problem in done.left} >= {"A103", "A107"}
    with h5py.File(tmp_path / "y") as file:
        assert file["obs/kind/codes"][...].tolist() == [0, 1.5, 2]


@pytest.mark.parametrize("second", [b"\xff", b"c\0d"])
def test_categories_that_cannot_be_written_keep_their_codes(second: bytes, tmp_path: Path) -> None:
    """Equal categories beside one that is no text stay, and so do the codes, which would mean others without them."""
    path = write_good(tmp_path / "x", "hdf5")
    categories, codes = np.array([b"a", b"a", b"b", second]), np.array([0, 1, 2, 3], np.int8)

    def repeat(root: Any) -> None:
        n = len(root["obs/kind/codes"])
        put(root, "obs/kind/categories", categories)
        put(root, "obs/kind/codes", np.resize(codes, n))

    damage(path, repeat)
    done = repair(path, tmp_path / "y")
    with h5py.File(path) as given, h5py.File(tmp_path / "y") as file:
        assert sorted(file["obs/kind"]) == ["categories", "codes"]
        assert np.array_equal(file["obs/kind/codes"], given["obs/kind/codes"])
        assert file["obs/kind/categories"][...].tolist() == categories.tolist()
    assert not any(line.startswith("A107") for line in done.mended)
