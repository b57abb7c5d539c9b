"""Let the converter of cellxgene and the TileDB of 2020 write small CXGs: ``make_old_cxgs.py CELLXGENE [--to TARGET]``.

Run it with Python 3.7 (``pip install tiledb==0.5.9 numpy==1.19.5 pandas==1.1.5 scipy==1.5.4 anndata==0.7.4 'h5py<3' 'click<8'
requests``), and again with tiledb 0.6.6: TileDB 1.7 writes format 4, TileDB 2.0 format 5.
CELLXGENE is the folder of the unpacked source distribution of cellxgene 0.16.2 (``pip download --no-deps --no-binary :all:
cellxgene==0.16.2``), the only release that ships ``server/converters/cxgtool.py``. It writes version 0.2.0; version 0.1 is the same
without ``corpora``, and the unnamed version the same without ``cxg_group_metadata``. The Zip file also holds the h5ad that went in.
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import tiledb

LONG_AGO = (1980, 1, 1, 0, 0, 0)
N_OBS, N_VAR = 40, 25


def make_input() -> Any:
    """Return a small AnnData: a mode per gene that is not 0, so that the converter can shift columns."""
    rng = np.random.RandomState(2020)
    counts = np.where(rng.uniform(size=(N_OBS, N_VAR)) < 0.15, rng.poisson(3, (N_OBS, N_VAR)), 0).astype(np.float32)
    labels: Any = ["T cell", "B cell", "NK cell"]
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical.from_codes(rng.randint(0, 3, N_OBS).tolist(), categories=labels),
            "n_genes": (counts > 0).sum(axis=1).astype(np.int32),
            "percent.mito": rng.uniform(size=N_OBS).astype(np.float32),
            "is_doublet": rng.uniform(size=N_OBS) < 0.2,
            "donor": [f"donor {i % 4}" for i in range(N_OBS)],
        },
        index=[f"AAAC{i:04d}-1" for i in range(N_OBS)],
    )
    var = pd.DataFrame(
        {"highly_variable": np.arange(N_VAR) % 3 == 0, "means": counts.mean(axis=0)},
        index=[f"GENE{i}" for i in range(N_VAR)],
    )
    made = anndata.AnnData(counts, obs, var)
    made.obsm["X_umap"] = rng.normal(size=(N_OBS, 2)).astype(np.float32)
    made.obsm["X_pca"] = rng.normal(size=(N_OBS, 5))
    made.uns["cell_type_colors"] = np.array(["#ff0000", "#00ff00", "#0000ff"])
    return made


def converter(folder: Path) -> Any:
    """Import the converter without the server around it, which needs many more packages."""
    package: Any = types.ModuleType("server")
    package.__path__, package.__version__ = [str(folder / "server")], "0.16.2"
    sys.modules["server"] = package
    sys.path.insert(0, str(folder))
    tool: Any = importlib.import_module("server.converters.cxgtool")
    tool.log_level = 0
    return tool


def write(tool: Any, data: Any, path: Path, version: str, threshold: float = 0.0, shift: float = 0.0) -> None:
    """Write one CXG; ``shift`` is added to every value, so that no zeros are left and the converter shifts columns."""
    data = data.copy()
    data.X = data.X + np.float32(shift)
    tool.CXG_VERSION = version or "0.1"
    metadata = tool.create_cxg_group_metadata(data, path.stem, title=path.stem, about="https://example.org/2020")
    tool.write_cxg(data, str(path), metadata, sparse_threshold=threshold)
    if not version:
        shutil.rmtree(str(path / "cxg_group_metadata"))


def pack(folder: Path, target: Path) -> None:
    """Put all files into a Zip file, in order and without dates; empty marks of TileDB are files too."""
    with zipfile.ZipFile(str(target), "w") as out:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            about = zipfile.ZipInfo(name + "/" if path.is_dir() else name, LONG_AGO)
            out.writestr(about, b"" if path.is_dir() else path.read_bytes(), zipfile.ZIP_DEFLATED)


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cellxgene", type=Path)
    named = f"cxg_tiledb_{tiledb.__version__}.zip"
    parser.add_argument("--to", type=Path, default=Path(__file__).parent.parent / "tests" / "data" / named)
    chosen = parser.parse_args()
    tool, data = converter(chosen.cellxgene), make_input()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data.write_h5ad(folder / "input.h5ad")
        write(tool, data, folder / "unnamed.cxg", "")
        write(tool, data, folder / "dense.cxg", "0.1")
        write(tool, data, folder / "sparse.cxg", "0.1", threshold=50.0)
        write(tool, data, folder / "shifted.cxg", "0.2.0", threshold=50.0, shift=0.5)
        about = {"tiledb": tiledb.__version__, "TileDB": list(tiledb.libtiledb.version()), "cellxgene": "0.16.2"}
        (folder / "written_by.json").write_text(json.dumps(about))
        pack(folder, chosen.to)


if __name__ == "__main__":
    main()
