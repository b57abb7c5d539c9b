"""Run by the interpreter of another anndata, any since 0.8: reads files and keeps what it found in ``.npz`` files.

``python peer_anndata.py FILE...`` leaves ``FILE.npz``.
"""

import sys
import warnings

import anndata
import numpy as np

warnings.simplefilter("ignore")
for path in sys.argv[1:]:
    adata = anndata.read_h5ad(path) if path.endswith(".h5ad") else anndata.read_zarr(path)
    found = {
        "X": adata.X.toarray(),
        "csc": adata.layers["csc"].toarray(),
        "dense": adata.layers["dense"],
        "raw": adata.raw.X.toarray(),
        "near": adata.obsp["near"].toarray(),
        "pca": adata.obsm["pca"],
        "pcs": adata.varm["pcs"],
        "codes": adata.obs["kind"].cat.codes.to_numpy(),
        "categories": adata.obs["kind"].cat.categories.to_numpy(str),
        "ordered": adata.obs["kind"].cat.ordered,
        "maybe": adata.obs["maybe"].fillna(-1).to_numpy("i8"),
        "cells": adata.obs_names.to_numpy(str),
        "features": adata.var_names.to_numpy(str),
        "raw_features": adata.raw.var_names.to_numpy(str),
        "colors": np.array(list(adata.uns["kind_colors"]), dtype="U"),
        "nested": adata.uns["p"]["s"],
        "number": adata.uns["p"]["n"],
    }
    for name in ("n", "flag", "text"):
        found[name] = adata.obs[name].to_numpy(str)
    np.savez(path + ".npz", **found)
