"""Files that versions 0.5 to 0.13 of anndata and 0.1 to 0.3 of mudata wrote: read, held against the rules, and given back."""

import io
import zipfile
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

from raggedatlas import RaggedAtlas
from raggedatlas.formats.anndata import validate
from raggedatlas.formats.copying import copy
from support.anndata_strategies import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = Path(__file__).parent.parent / "data"
with zipfile.ZipFile(DATA / "archives.zip") as found:
    NAMES = found.namelist()
OLD = ("anndata-0.5", "anndata-0.7", "mudata-0.1")
"""Versions before encodings were declared."""


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each archived file, and each folder of Zarr unpacked, by its name in the archive."""
    to = tmp_path_factory.mktemp("archives")
    paths = {}
    with zipfile.ZipFile(DATA / "archives.zip") as archive:
        for name in NAMES:
            paths[name] = to / name.removesuffix(".zip")
            paths[name].parent.mkdir(exist_ok=True)
            if not name.endswith(".zip"):
                paths[name].write_bytes(archive.read(name))
                continue
            with zipfile.ZipFile(io.BytesIO(archive.read(name))) as folder:
                folder.extractall(paths[name])
    return paths


def read(path: Path) -> Any:
    """Read what anndata or mudata reads."""
    if path.suffix == ".h5ad":
        return ad.read_h5ad(path)
    if path.suffix == ".zarr" and not (path / "mod").exists():
        return ad.read_zarr(path)
    mudata = pytest.importorskip("mudata")
    # Of a Zarr folder mudata reads neither raw nor the axis; the same object was written as HDF5 too.
    return mudata.read_h5mu(path.with_suffix(".h5mu"))


def check_equal(one: Any, other: Any) -> None:
    if not hasattr(one, "mod"):
        assert_equal(numbered(one), numbered(other))
        return
    assert list(one.mod) == list(other.mod)
    for name in one.mod:
        assert_equal(one.mod[name], other.mod[name])
    assert_equal(one.obs, other.obs)
    assert_equal(one.var, other.var)


def numbered(adata: ad.AnnData) -> ad.AnnData:
    """Put a number for what is no number, which anndata does not find equal to itself."""
    for name, values in adata.varm.items():
        if isinstance(values, np.ndarray):
            adata.varm[name] = np.nan_to_num(values, nan=-12345.0)
    return adata


@pytest.mark.parametrize("name", NAMES)
def test_archived_files_keep_the_rules_of_their_time(archives: dict[str, Path], name: str) -> None:
    """None breaks a rule that must be kept, at either level; those from before 0.8 are told as such, no others are."""
    for level in ("metadata", "full"):
        problems = validate(archives[name], level)
        assert [str(p) for p in problems if p.level == "must"] == []
        assert ("A11" in {p.rule for p in problems}) == name.startswith(OLD)
        assert {p.rule for p in problems} <= {"A11", "A59", "A152"}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 4 == 0 else pytest.mark.nightly) for i, name in enumerate(NAMES)]
)
def test_archived_files_come_back(archives: dict[str, Path], name: str, tmp_path: Path) -> None:
    """What an atlas gives back, and what a copy of the file holds, is what anndata or mudata reads of the file.

    Copies are in the layout of today and break no rule that must be kept.
    """
    given = read(archives[name])
    atlas = RaggedAtlas.create(tmp_path / "a.atlas")
    spaces = {"mod1": "gene_expression", "mod2": "protein_abundance"} if hasattr(given, "mod") else {}
    dataset = atlas.dataset(atlas.add(archives[name], spaces=spaces, progress=False).dataset_uid)
    check_equal(dataset.to_mudata() if hasattr(given, "mod") else dataset.to_anndata(), given)
    target = tmp_path / ("x.h5mu" if hasattr(given, "mod") else "x.h5ad")
    copy(archives[name], target)
    check_equal(read(target), given)
    assert {p.rule for p in validate(target, "full")} <= {"A59", "A152"}
