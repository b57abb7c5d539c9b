"""`read` and `copy` stand on one source: both give the same values, or refuse in the same words."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from formats.test_loom import write_loom
from formats.test_tenx import write_h5, write_mtx
from raggedatlas.errors import AtlasError, NotFoundError
from raggedatlas.formats.anndata import repair
from raggedatlas.formats.registry import READERS
from support.anndata_strategies import anndatas, assert_same
from support.cxg_files import write_cxg
from support.hypothesis_profile import examples

mudata = pytest.importorskip("mudata")
pytestmark = pytest.mark.filterwarnings("ignore")

TYPES = ["Gene Expression", "Antibody Capture", "Peaks", "Gene Expression", "CRISPR Guide Capture", "Peaks", "Peaks"]


def two_modalities(adata: ad.AnnData) -> Any:
    """Return a MuData whose second modality lacks the first cell."""
    with warnings.catch_warnings(action="ignore"):
        return mudata.MuData({"rna": adata, "prot": adata[1:, :1].copy()})


def outcome(get: Any) -> Any:
    """Return what a call gives, or the words of its refusal."""
    try:
        return get()
    except AtlasError as error:
        return f"{type(error).__name__}: {error}"


def assert_law(path: Path, **choice: Any) -> Any:
    """Assert that a file and its copy read equal, or are refused in the same words; return what is read."""
    found = outcome(lambda: ra.read(path, **choice))
    target = path.parent / ("copy.h5mu" if isinstance(found, mudata.MuData) else "copy.h5ad")
    target.unlink(missing_ok=True)
    copied = outcome(lambda: ra.read(ra.copy(path, target, **choice)))
    if isinstance(found, str) or isinstance(copied, str):
        assert (found if isinstance(found, str) else "read") == (copied if isinstance(copied, str) else "copied")
    elif isinstance(found, mudata.MuData):
        assert list(found.mod) == list(copied.mod)
        for name in found.mod:
            assert_same(copied[name], found[name])
            np.testing.assert_array_equal(copied.obsmap[name], found.obsmap[name])
        pd.testing.assert_frame_equal(copied.obs, found.obs)
        assert list(copied.var_names) == list(found.var_names)
    else:
        assert_same(copied, found)
    return found


@pytest.mark.parametrize("name", sorted(READERS))
@given(adata=anndatas(), types=st.sampled_from([TYPES, TYPES[:1] * 7, None]))
@examples(1)
def test_every_format_is_read_as_it_is_copied(
    tmp_path_factory: pytest.TempPathFactory, name: str, adata: ad.AnnData, types: list[str] | None
) -> None:
    """Each format that the registry knows has its maker here; without one the test fails."""
    folder = tmp_path_factory.mktemp("law")
    makers = {
        "h5ad": lambda path: ra.copy(adata, path),
        "zarr": lambda path: ra.copy(adata, path),
        "h5mu": lambda path: ra.copy(two_modalities(adata), path),
        "cxg": write_cxg,
        "loom": lambda path: write_loom(path, col_attrs__pca=np.eye(2)),
        "10x-h5": lambda path: write_h5(path, types),
        "10x-mtx": lambda path: write_mtx(path, packed=True, types=types is not None),
    }
    if name == "soma":
        pytest.skip("test_soma.py compares it, since it is written by another process")
    path = folder / f"x.{name.removeprefix('10x-')}"
    with warnings.catch_warnings(action="ignore"):
        makers[name](path)
    assert_law(path)


@pytest.mark.parametrize(
    ("modality", "columns", "same"),
    [("rna", [0, 3], "Gene Expression"), ("prot", [1], "Antibody Capture"), ("atac", [2, 5, 6], "Peaks")],
)
def test_feature_types_of_10x_are_modalities(tmp_path: Path, modality: str, columns: list[int], same: str) -> None:
    """A file with several gives a MuData, and each by its short name and by its feature type."""
    write_h5(tmp_path / "x.h5", TYPES)
    whole = assert_law(tmp_path / "x.h5")
    assert list(whole.mod) == ["rna", "prot", "atac", "CRISPR Guide Capture"]
    for name in (modality, same):
        part = assert_law(tmp_path / "x.h5", modality=name)
        assert list(part.var_names) == [f"ENSG{i}" for i in columns]
        np.testing.assert_array_equal(part.X.toarray(), whole[modality].X.toarray())
    with pytest.raises(NotFoundError, match="CRISPR Guide Capture"):
        ra.read(tmp_path / "x.h5", modality="Custom")


def test_frames_with_other_names_are_refused_alike(tmp_path: Path) -> None:
    """A frame of obsm whose rows have other names than the cells has one answer."""
    adata = ad.AnnData(np.ones((2, 1)), obsm={"p": pd.DataFrame({"a": [1, 2]}, index=["0", "1"])})
    adata.write_h5ad(tmp_path / "x.h5ad")
    with h5py.File(tmp_path / "x.h5ad", "r+") as file:
        del file["obs/_index"]
        ad.io.write_elem(file["obs"], "_index", np.array(["c0", "c1"], dtype=object))
    assert "obsm/p has the name '0' in row 0, where obs has 'c0'" in assert_law(tmp_path / "x.h5ad")


def every_kind_of_element() -> ad.AnnData:
    """Return an AnnData with a member of each kind in each group."""
    names = [f"c{i}" for i in range(4)]
    columns = {
        "cat": pd.Categorical(["a", "b", "a", None]),
        "int": pd.array([1, 2, None, 4], "Int64"),
        "bool": pd.array([True, None, False, True], "boolean"),
        "text": list("abcd"),
    }
    values = sp.csr_matrix(np.arange(12.0).reshape(4, 3))
    adata = ad.AnnData(
        values, obs=pd.DataFrame(columns, index=names), var=pd.DataFrame({"s": list("xyz")}, index=list("ghi"))
    )
    adata.layers.update({"dense": values.toarray(), "csc": values.tocsc()})
    frame = pd.DataFrame({"p": np.arange(4.0), "q": list("abcd")}, index=names)
    adata.obsm.update(
        {"table": frame, "numbers": frame[["p"]], "pca": np.ones((4, 2)), "sparse": sp.csr_matrix(np.eye(4))}
    )
    adata.varm.update({"pcs": np.ones((3, 2)), "table": pd.DataFrame({"u": [1, 2, 3]}, index=list("ghi"))})
    adata.obsp["distances"], adata.varp["correlations"] = sp.csr_matrix(np.eye(4)), np.eye(3)
    adata.uns = {"x": {"obs": 3, "z": "t"}, "array": np.arange(3), "frame": pd.DataFrame({"k": [1, 2]})}
    wide = ad.AnnData(np.ones((4, 5)), obs=adata.obs[[]], varm={"w": np.ones((5, 2))})
    adata.raw = wide
    return adata


DAMAGES: dict[str, Any] = {
    "one number": (3.0, "numeric-scalar"),
    "one text": ("abc", "string"),
    "another length": (np.ones(7), "array"),
    "two axes": (np.ones((4, 4)), "array"),
    "three axes": (np.ones((7, 2, 2)), "array"),
    "texts": (np.array(list("abcd"), object), "string-array"),
    "nothing": (h5py.Empty("f4"), "null"),
    "a mapping": (None, "dict"),
    "an undeclared group": (None, ""),
    "gone": (None, None),
    "undeclared": (None, None),
    "integers": (None, None),
}
"""What takes the place of a member of a file: its value (None for a group) and its encoding. The last two change the member itself."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a member of each kind."""
    path = tmp_path_factory.mktemp("whole") / "x.h5ad"
    every_kind_of_element().write_h5ad(path)
    return path


def damage(path: Path, source: Path, member: str, kind: str) -> None:
    """Write a copy of a file in which something else is in the place of a member."""
    shutil.copyfile(source, path)
    value, encoding = DAMAGES[kind]
    with h5py.File(path, "r+") as file:
        kept = dict(file[member].attrs)
        if kind == "undeclared":
            for name in {"encoding-type", "encoding-version"} & set(kept):
                del file[member].attrs[name]
            return
        if kind == "integers" and getattr(file[member], "dtype", None) == np.dtype(bool):
            value, encoding = file[member][...].astype(np.int32), ""
        elif kind == "integers":
            return
        del file[member]
        if encoding is None:
            return
        made = file.create_group(member) if value is None else file.create_dataset(member, data=value)
        if encoding:
            version = "0.1.0" if encoding in ("dict", "null") else "0.2.0"
            made.attrs["encoding-type"], made.attrs["encoding-version"] = encoding, version
        if kind == "integers":
            made.attrs.update(kept)


@pytest.mark.long
@given(data=st.data())
@examples(12)
def test_damaged_files_are_refused_alike(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, data: st.DataObject
) -> None:
    """Whatever is in the place of a member: both read the same, or refuse in the same words, which name it or its group.

    The refusal offers `fix` where the copy can be read then, and only there.
    """
    members: list[str] = []
    with h5py.File(whole) as file:
        file.visit(members.append)
    member, kind = data.draw(st.sampled_from(members)), data.draw(st.sampled_from(sorted(DAMAGES)))
    path = tmp_path_factory.mktemp("damaged") / "x.h5ad"
    damage(path, whole, member, kind)
    found = assert_law(path)
    # A table of another length is found by what goes along it.
    along = member.endswith("_index") and "has shape" in str(found)
    assert not isinstance(found, str) or along or member.split("/")[0] in found
    if isinstance(found, str):
        fixed = path.with_name("fixed.h5ad")
        assert ("COPY` fixes" in found) == (not isinstance(outcome(lambda: ra.read(repair(path, fixed).path)), str))


@pytest.mark.parametrize(
    ("member", "kind"),
    [
        ("obsm/table", "one number"),
        ("obsm/table/q", "two axes"),
        ("obs/cat/categories", "one number"),
        ("obs/int/values", "two axes"),
        ("raw/varm/w", "two axes"),
        ("raw/X", "gone"),
        ("obsp/distances", "another length"),
        ("obs/bool/mask", "integers"),
        ("obsm/sparse", "undeclared"),
    ],
)
def test_the_damaged_member_is_named(tmp_path: Path, whole: Path, member: str, kind: str) -> None:
    """What once let an error of a library out, or was read by one and refused by the other; with `fix` where that helps."""
    damage(tmp_path / "x.h5ad", whole, member, kind)
    found = assert_law(tmp_path / "x.h5ad")
    assert isinstance(found, str)
    assert member.removesuffix("/mask") in found
    assert ("COPY` fixes" in found) == (kind in ("integers", "undeclared"))
