"""Makes ``tests/data/records_anndata_0.13.zarr.zip``: what scanpy's rankings look like as anndata 0.13 writes them by default.

Run by Python 3.13 with requirements/lock-3.13.txt: ``python scripts/make_records.py``. Values are made up; each is a
function of its position.
"""

import shutil
import tempfile
import warnings
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
from scipy import sparse

TARGET = Path(__file__).parent.parent / "tests" / "data" / "records_anndata_0.13.zarr.zip"


def made() -> anndata.AnnData:
    """Return three cells with rankings, of which one is named as scanpy's own file names them."""
    obs = pd.DataFrame({"kind": ["a", "b", "a"], "text": ["x", "y", "z"]}, index=["c0", "c1", "c2"])
    adata = anndata.AnnData(sparse.csr_matrix(np.eye(3, 4, dtype=np.float32)), obs=obs)
    fields = ["CD4+/CD25 T Reg", "T/NK", "B"]
    names = np.array([("CD3E", "NKG7", "MS4A1"), ("CD4", "GNLY", "CD79A")], dtype=[(name, "O") for name in fields])
    scores = np.array([(1.5, 2.5, 3.5), (0.5, 1.0, 2.0)], dtype=[(name, "f4") for name in fields])
    adata.uns["rank_genes_groups"] = {
        "names": names,
        "scores": scores,
        "params": {"method": "t-test", "groupby": "kind"},
    }
    adata.uns["complex"] = np.complex128(1 + 2j)
    adata.uns["nothing"] = None
    return adata


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        made().write_zarr(f"{folder}/store")
        shutil.make_archive(f"{folder}/made", "zip", f"{folder}/store")
        shutil.move(f"{folder}/made.zip", TARGET)
