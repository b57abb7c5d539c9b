"""Damaged AnnData files: told what is wrong, in bounded time, and repaired in a copy, made whole or not at all, with values as they were."""

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import write_elem
from hypothesis import given
from hypothesis import strategies as st

from campaigns import random_damage
from campaigns.random_damage import array, attribute, attributes, member, read_by_anndata, read_by_us
from raggedatlas.errors import AtlasError, DuplicateError, NotFoundError, SourceError, StoreError
from raggedatlas.formats.anndata import Limits, fixes, validate
from raggedatlas.formats.anndata.fixes import FIXES, repair
from raggedatlas.formats.registry import open_source
from raggedatlas.store.executors import spawned
from support.anndata_faults import AWKWARD_FORM, FORMS, Form, damage, put, write_good
from support.hypothesis_profile import examples


@pytest.mark.parametrize("form", FORMS)
def test_what_is_good_is_copied_as_it_is(form: Form, tmp_path: Path) -> None:
    """A file without fault is copied byte for byte."""
    good = write_good(tmp_path / "x", form)
    done = repair(good, tmp_path / "y")
    assert (done.path, done.fixed, done.left) == (str(tmp_path / "y"), (), ())
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
    done = repair(path, tmp_path / "fixed")
    assert done.left == ()
    assert {line.split()[0] for line in done.fixed} >= {"A01", "A26", "A60", "A73", "A102", "A123"}
    back, given = read_as(form, tmp_path / "fixed"), read_as(form, good)
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
    """Where a later chunk cannot be read, no copy is written."""
    write_duplicates(tmp_path / "x", chunks=(3,), compression="gzip")
    with h5py.File(tmp_path / "x", "r+") as file:
        file["X/data"].id.write_direct_chunk((3,), b"damaged")
    monkeypatch.setattr(fixes, "ENTRIES", 1)
    with pytest.raises(SourceError, match="A00 must: X/data"):
        repair(tmp_path / "x", tmp_path / "y")
    assert [at.name for at in tmp_path.iterdir()] == ["x"]


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


def musts(path: Path) -> set[str]:
    return {f"{problem.rule} {problem.path}" for problem in validate(path, "full") if problem.level == "must"}


@pytest.mark.parametrize("change", [attribute, array, member])
def test_damaged_structure_is_told_or_read(change: Callable[..., str], tmp_path: Path) -> None:
    """Whatever is done to attributes, arrays and groups, the validator ends with a list or a refusal, and what it lets pass is read."""
    good = write_good(tmp_path / "good.h5ad", "hdf5", awkward=True).read_bytes()
    path = tmp_path / "x.h5ad"
    for seed in range(8):
        path.write_bytes(good)
        did = change(path, np.random.default_rng(seed))
        try:
            found = musts(path)
        except AtlasError:
            continue
        assert found or not (read_by_anndata(path) and read_by_us(path)), (seed, did)


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_attributes_of_every_type_are_told_or_read(form: Form) -> None:
    """Attributes that are removed or of a wrong type end in a list or a refusal, and what is let pass is read by anndata and by us."""
    with spawned(1) as fresh:
        cases = fresh.submit(attributes, [form], 37).result()
    assert len(cases) > 30
    assert [case for case in cases if case["outcome"] not in ("told", "sound and read")] == []


def _attribute(at: str, name: str, value: Any) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        if value is None:
            del root[at].attrs[name]
        else:
            root[at].attrs[name] = value

    return change


INNER = (
    "obs/kind/codes", "obs/kind/categories", "obs/count/values", "obs/maybe/mask", "obs/note/values",
    "obsm/ragged/node1-data",
)  # fmt: skip


@pytest.mark.parametrize("form", ["hdf5", "zarr3"])
@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("encoding-type", "nonsense", "A03"), ("encoding-type", None, "A01"), ("encoding-version", "new", "A02")],
)
def test_encodings_of_inner_arrays_are_checked(form: Form, name: str, value: Any, rule: str, tmp_path: Path) -> None:
    """Codes, categories, values, masks and buffers are read by the encoding that they declare; one that nothing knows is told."""
    path = write_good(tmp_path / ("x.h5ad" if form == "hdf5" else "x.zarr"), form, awkward=True)
    for at in INNER:
        damage(path, _attribute(at, name, value))
    assert read_by_anndata(path)
    assert {f"{rule} {at}" for at in INNER} <= musts(path)


@pytest.mark.parametrize(
    "at", ["X", "obs", "obs/score", "obs/kind/codes", "obsm/pca", "layers/csc/indptr", "uns/number", "raw", "uns"]
)
def test_a_named_datatype_is_no_array(at: str, tmp_path: Path) -> None:
    """A named datatype in the place of an array or a group is told, and no copy is written."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")

    def change(root: Any) -> None:
        del root[at]
        root[at] = np.dtype("f8")

    damage(path, change)
    found = musts(path)
    assert any(at.startswith(said.split(" ", 1)[1]) or said.endswith(f" {at}") for said in found), found
    with pytest.raises(SourceError, match="No copy was written"):
        repair(path, tmp_path / "copy.h5ad")


@pytest.mark.parametrize("key", ["offsets", "content", "class"])
def test_a_form_without_a_key_is_told(key: str, tmp_path: Path) -> None:
    """A form of an awkward array that lacks a key of its class cannot be read, and is told."""
    path = write_good(tmp_path / "x.h5ad", "hdf5", awkward=True)
    form = {name: value for name, value in AWKWARD_FORM.items() if name != key}
    damage(path, _attribute("obsm/ragged", "form", json.dumps(form)))
    assert read_by_anndata(path)
    assert "A150 obsm/ragged" in musts(path)


def test_members_that_no_list_names_do_not_stop_a_reader(tmp_path: Path) -> None:
    """A scalar in a frame whose column-order leaves it out breaks nothing that must be: anndata and we read the file."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    scalar = {"encoding-type": "numeric-scalar", "encoding-version": "0.2.0"}
    for at in ("raw/var/extra", "obs/extra"):
        damage(path, lambda root, at=at: put(root, at, np.array(3.5), **scalar) and None)
    assert musts(path) == set()
    assert not read_by_anndata(path)
    source = open_source(path)
    assert source.cells().num_rows == 3
    source.close()
    damage(path, lambda root: put(root, "obs/score", np.ones((3, 2))) and None)
    assert musts(path) == {"A75 obs"}


def test_an_element_that_has_no_reader_is_refused_by_repair(tmp_path: Path) -> None:
    """A repair meets an element that anndata has no reader for, and says so."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    with h5py.File(path, "r+") as file:
        file["obs/kind/categories"].attrs["encoding-type"] = "nonsense"
        file["obs/kind"].attrs["ordered"] = "no"
        file["obs/word"].attrs["encoding-type"] = "array"
    with pytest.raises(SourceError, match="No copy was written"):
        repair(path, tmp_path / "copy.h5ad")


@pytest.mark.nightly
def test_limits_of_a_check(tmp_path: Path) -> None:
    """With limits a file is checked in a process of its own: the same answers and refusals, and A00 where time or memory runs out."""
    path = write_good(tmp_path / "x.h5ad", "hdf5", awkward=True)
    assert validate(path, "full", limits=Limits.of(path)) == validate(path, "full")
    for limits, said in ((Limits(0.01, 2**32), "not checked within"), (Limits(60, 2**16), "process|memory")):
        (problem,) = validate(path, limits=limits)
        assert (problem.rule, problem.level, problem.path) == ("A00", "must", "")
        assert re.search(said, problem.message)
    with pytest.raises(NotFoundError, match="absent"):
        validate(tmp_path / "absent.h5ad", limits=Limits(60, 2**32))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("asked", [["--n", "3000"], ["--attributes"]])
def test_the_campaign(asked: list[str]) -> None:
    """Of 3,000 damaged files in HDF5 and Zarr, and of all wrong attributes, none raises a foreign error, exceeds the limits, or passes though
    nobody reads it."""
    with warnings.catch_warnings(action="ignore"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", random_damage.__file__, *asked],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.long
@pytest.mark.parametrize("form", ["zarr2", "zarr3"])
def test_names_that_differ_only_in_case_are_consolidated_again(form: Form, tmp_path: Path) -> None:
    """zarr-python cannot read the metadata that it consolidates of two such groups; the copy has them in an order that it can."""
    path = write_good(tmp_path / "x", form)

    def change(root: Any) -> None:
        for name in ("Study", "study"):
            write_elem(root["obs"], name, pd.Categorical(["a", None, name]))
        root["obs"].attrs["column-order"] = [*root["obs"].attrs["column-order"], "Study", "study"]
        write_elem(root["uns"], "Deep", {"Level": 1, "more": 2})

    damage(path, change)
    with warnings.catch_warnings(action="ignore"):
        zarr.consolidate_metadata(path)
    assert [problem.rule for problem in validate(path, "full")] == ["A05"]
    assert validate(path, "metadata") == []
    assert repair(path, tmp_path / "y").fixed == ("A05 the root: metadata consolidated again",)
    with warnings.catch_warnings(action="ignore"):
        back = ad.read_zarr(tmp_path / "y")
    assert back.obs["study"].cat.categories.tolist() == ["a", "study"]
    assert set(back.uns["Deep"]) == {"Level", "more"}
