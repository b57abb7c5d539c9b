"""Other releases of anndata open what we write, equal.

Asked for by ``-m peers``; needs the environments that ``benchmarks/peers.sh anndata`` makes.
"""

import os
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_sink

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("peer_anndata.py")
PYTHONS = {
    "0.8": ROOT / ".venv-peers-anndata-0.8/bin/python",
    "0.10": ROOT / ".venv-peers-anndata-0.10/bin/python",
    "installed": Path(sys.executable),
}
N, M = 40, 12

# anndata 0.13 asks pandas 3 for options that pandas 3 deprecates.
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"),
]


def given() -> ad.AnnData:
    rng = np.random.default_rng(0)
    x = sp.csr_matrix(rng.poisson(0.5, (N, M)).astype(np.float32))
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(np.arange(N) % 3 - 1, ["T", "B", "NK"], ordered=True),
            "n": np.arange(N, dtype=np.int16),
            "flag": np.arange(N) % 2 == 0,
            "text": [f"t{i}" for i in range(N)],
            "maybe": pd.array([None, *range(1, N)], dtype="Int32"),
        },
        index=[f"c{i}" for i in range(N)],
    )
    var = pd.DataFrame(index=[f"g{i}" for i in range(M)])
    adata = ad.AnnData(x[:, 2:], obs=obs, var=var[2:])
    adata.raw = ad.AnnData(x, obs=obs, var=var)
    adata.layers["csc"], adata.layers["dense"] = adata.X.tocsc(), adata.X.toarray().astype(np.int64)
    adata.obsm["pca"], adata.varm["pcs"] = rng.normal(size=(N, 3)), rng.normal(size=(M - 2, 3))
    adata.obsp["near"] = sp.eye(N, format="csr")
    adata.uns = {"kind_colors": np.array(["#ff0000", "#00ff00", "#0000ff"], dtype=object), "p": {"n": 3, "s": "x"}}
    return adata


@pytest.mark.parametrize("version", list(PYTHONS))
def test_other_releases_open_what_we_write(tmp_path: Path, version: str) -> None:
    """anndata 0.8, 0.10 and the installed one read our h5ad and Zarr format 2 with every value that was given."""
    python = PYTHONS[version]
    if not python.exists():
        pytest.skip(f"anndata {version} is not installed; benchmarks/peers.sh anndata installs it")
    adata = given()
    paths = [
        copy(adata, open_sink(tmp_path / "gzip.h5ad")),
        copy(adata, open_sink(tmp_path / "plain.h5ad", compression=None)),
        copy(adata, open_sink(tmp_path / "two.zarr", zarr_format=2)),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(python), str(SCRIPT), *paths]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    wanted = {
        "X": adata.X.toarray(), "csc": adata.X.toarray(), "dense": adata.layers["dense"], "raw": adata.raw.X.toarray(),
        "near": np.eye(N), "pca": adata.obsm["pca"], "pcs": adata.varm["pcs"], "codes": np.arange(N) % 3 - 1,
        "categories": ["T", "B", "NK"], "ordered": True, "maybe": [-1, *range(1, N)], "cells": [f"c{i}" for i in range(N)],
        "features": [f"g{i}" for i in range(2, M)], "raw_features": [f"g{i}" for i in range(M)],
        "colors": ["#ff0000", "#00ff00", "#0000ff"], "nested": "x", "number": 3, "n": [str(i) for i in range(N)],
        "flag": [str(i % 2 == 0) for i in range(N)], "text": [f"t{i}" for i in range(N)],
    }  # fmt: skip
    for path in paths:
        found = np.load(f"{path}.npz")
        assert set(found.files) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{path} {name}")


def test_rankings_are_still_rankings_to_scanpy(tmp_path: Path) -> None:
    """`rank_genes_groups_df` of scanpy gives the same table after h5ad, Zarr 2, Zarr 3 and an atlas, there and back."""
    scanpy = pytest.importorskip("scanpy")
    given_at = ROOT / "tests/data/pbmc68k_reduced.h5ad"
    wanted = scanpy.get.rank_genes_groups_df(ad.read_h5ad(given_at), group=None)
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(given_at, "d", progress=False)
    back = [atlas.dataset("d").to_anndata()]
    for number in (2, 3):
        path = copy(given_at, open_sink(tmp_path / f"{number}.zarr", zarr_format=number))
        back += [ad.read_zarr(path), ad.read_h5ad(copy(path, tmp_path / f"{number}.h5ad"))]
    for found in back:
        pd.testing.assert_frame_equal(wanted, scanpy.get.rank_genes_groups_df(found, group=None))
