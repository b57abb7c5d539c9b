"""A small atlas of two datasets that do not share their genes, one with proteins too, and what a query of it gives."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import create_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.ingest.add import add
from raggedatlas.query.query import Query
from raggedatlas.store.location import Location

GENES = {"first": ["a", "b", "c", "d", "e"], "second": ["d", "f", "a"]}


@dataclass(frozen=True, repr=False)
class Small:
    """A query of everything, and its result."""

    folder: Path
    query: Query
    counts: NDArray[np.float32]
    obs: pd.DataFrame

    @property
    def uids(self) -> list[str]:
        return list(map(str, self.obs.index))


def make_file(name: str, n: int, seed: int) -> ad.AnnData:
    """Create the dataset ``first`` or ``second``: counts, a layer, columns of several kinds, an embedding."""
    rng = np.random.default_rng(seed)
    choice: Any = rng.choice
    counts = sp.csr_matrix(rng.poisson(0.8, (n, len(GENES[name]))).astype(np.float32))
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(choice(["B", "T", None], n), categories=["T", "B", "unused"]),
            "donor": choice(["D2", "D1"], n),
            "percent.mt": rng.random(n),
            "n": pd.array(choice([1, 2, None], n), dtype="Int64"),
            "flag": pd.array(choice([True, False, None], n), dtype="boolean"),
            "plate": rng.integers(0, 3, n),
            "tissue": choice(["lung", "blood"], n),
            "score": np.where(rng.random(n) < 0.2, np.nan, rng.random(n)),
        },
        index=[f"cell{i}" for i in range(n)],
    )
    file = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=GENES[name]))
    file.layers["log"] = counts.log1p()
    file.obsm["X_z"] = rng.normal(size=(n, 4)).astype(np.float32)
    if name == "first":
        file.obsm["proteins"] = pd.DataFrame(rng.poisson(5, (n, 2)), index=obs.index, columns=["CD3", "CD19"])
    return file


def make_small(folder: Path, n_first: int, n_second: int) -> Small:
    """Create the atlas with one snapshot in a folder."""
    catalog = create_catalog(Location(str(folder)))
    for name, n, seed in (("first", n_first, 1), ("second", n_second, 2)):
        spaces = {"obsm/X_z": "embedding"} | ({"obsm/proteins": "protein_abundance"} if name == "first" else {})
        add(catalog, make_file(name, n, seed), {"name": name, "spaces": spaces}, False)
    query = Query(catalog.at(snapshot(catalog)))
    result = query.to_anndata()
    return Small(folder, query, result.X.toarray().astype(np.float32), result.obs)
