"""Random damage to AnnData files: every file is told what is wrong with it, in bounded time, or can be read."""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from campaigns import random_damage
from campaigns.random_damage import array, attribute, attributes, member, read_by_anndata, read_by_us
from raggedatlas.errors import AtlasError, NotFoundError, SourceError
from raggedatlas.formats.anndata import Limits, repair, validate
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_source
from raggedatlas.store.executors import spawned
from raggedatlas.testing.anndata_faults import AWKWARD_FORM, FORMS, Form, _element, damage, put, texts, write_good


def musts(path: Path) -> set[str]:
    return {f"{problem.rule} {problem.path}" for problem in validate(path, "full") if problem.level == "must"}


@pytest.mark.long
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


def _named_type(at: str) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        del root[at]
        root[at] = np.dtype("f8")

    return change


def _attribute(at: str, name: str, value: Any) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        if value is None:
            del root[at].attrs[name]
        else:
            root[at].attrs[name] = value

    return change


INNER = (
    "obs/kind/codes",
    "obs/kind/categories",
    "obs/count/values",
    "obs/maybe/mask",
    "obs/note/values",
    "obsm/ragged/node1-data",
)


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
    """A named datatype in the place of an array or a group is told, and a repaired copy is told the same."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    damage(path, _named_type(at))
    found = musts(path)
    assert any(at.startswith(said.split(" ", 1)[1]) or said.endswith(f" {at}") for said in found), found
    assert any(problem.level == "must" for problem in repair(path, tmp_path / "copy.h5ad").left)


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


@pytest.mark.long
@pytest.mark.parametrize("ending", [".h5ad", ".zarr"])
def test_frames_of_other_names_are_not_converted(ending: str, tmp_path: Path) -> None:
    """A frame in obsm whose rows have other names than obs is refused, and nothing is written that anndata refuses."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    copy(path, tmp_path / f"good{ending}")
    damage(path, _element("obsm/frame/_index", texts("c1", "c3", "c2")))
    with pytest.raises(SourceError, match="obsm/frame has the name 'c3' in row 1, where obs has 'c2'"):
        copy(path, tmp_path / f"bad{ending}")
    assert not (tmp_path / f"bad{ending}").exists()


def test_an_element_that_has_no_writer_is_left_by_repair(tmp_path: Path) -> None:
    """A repair meets an element that anndata has no reader for: it is left as it is, and told."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    with h5py.File(path, "r+") as file:
        file["obs/kind/categories"].attrs["encoding-type"] = "nonsense"
        file["obs/kind"].attrs["ordered"] = "no"
        file["obs/word"].attrs["encoding-type"] = "array"
    done = repair(path, tmp_path / "copy.h5ad")
    assert "A03" in {problem.rule for problem in done.left}


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
