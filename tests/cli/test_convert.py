"""The verb convert: whole files and parts of them, their options, warnings and refusals in one line."""

import json
import warnings
from pathlib import Path

import anndata as ad
import h5py
import pytest
import zarr

from command import ask, done, refused
from support.atlases import small_anndata

# anndata 0.13 asks pandas 3 for options that pandas 3 deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"
)
DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A small file."""
    adata = small_anndata(0)
    adata.layers["counts"] = adata.X.copy()
    with warnings.catch_warnings(action="ignore"):
        adata.write_h5ad(tmp_path / "in.h5ad")
    return tmp_path / "in.h5ad"


def test_a_part_is_converted(given: Path, tmp_path: Path) -> None:
    """Conditions, features and layers narrow what is written; progress goes to stderr and the path to stdout."""
    out = tmp_path / "out.zarr"
    said = ask(f"convert {given} {out} -w \"cell_type = 'B'\" -f GENE3 -f GENE1 -l X --zarr-format 2 --json")
    assert said.exit_code == 0, said.stderr
    assert json.loads(said.stdout) == {"path": str(out)}
    assert "X 10 of 10" in said.stderr
    with warnings.catch_warnings(action="ignore"):
        whole, part = ad.read_h5ad(given), ad.read_zarr(out)
    assert list(part.var_names) == ["GENE3", "GENE1"]
    assert not part.layers
    assert part.n_obs == (whole.obs["cell_type"] == "B").sum()
    assert zarr.open_group(out, mode="r").metadata.zarr_format == 2


def test_compression_and_overwriting_are_chosen(given: Path, tmp_path: Path) -> None:
    """A compression and none at all are taken; a target that exists is replaced only when asked."""
    for compression, filters in (("lzf", "lzf"), ("none", None)):
        done("convert", given, tmp_path / "out.h5ad", "--compression", compression, "--overwrite")
        with h5py.File(tmp_path / "out.h5ad") as file:
            assert file["X/data"].compression == filters
    assert "overwrite" in refused("convert", given, tmp_path / "out.h5ad")


@pytest.mark.nightly
def test_modalities_are_kept_or_chosen(tmp_path: Path) -> None:
    """A MuData becomes a MuData folder, one modality of it an h5ad, and without a choice it is refused in one line."""
    source = DATA / "wu2020.h5mu"
    assert ask("convert", source, tmp_path / "all.zarr").exit_code == 0
    assert ask("convert", tmp_path / "all.zarr", tmp_path / "one.h5ad", "--modality", "gex").exit_code == 0
    assert "['gex', 'airr']" in refused("convert", source, tmp_path / "none.h5ad")
    assert not (tmp_path / "none.h5ad").exists()
