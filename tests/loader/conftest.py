"""A small atlas of two datasets that do not share their genes, one with proteins too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.catalog.catalog import create_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.ingest.add import add
from raggedatlas.loader import cells
from raggedatlas.query.query import Query
from raggedatlas.store.location import Location

GENES = {"first": ["a", "b", "c", "d", "e"], "second": ["d", "f", "a"]}


@dataclass(frozen=True, repr=False)
class Small:
    """A query of everything, and its result."""

    query: Query
    counts: Any
    obs: pd.DataFrame


def make_file(name: str, n: int, seed: int) -> ad.AnnData:
    rng = np.random.default_rng(seed)
    counts = sp.csr_matrix(rng.poisson(0.8, (n, len(GENES[name]))).astype(np.float32))
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(rng.choice(["B", "T", None], n), categories=["T", "B", "unused"]),
            "donor": rng.choice(["D2", "D1"], n),
            "percent.mt": rng.random(n),
            "n": pd.array(rng.choice([1, 2, None], n), dtype="Int64"),
            "flag": pd.array(rng.choice([True, False, None], n), dtype="boolean"),
            "plate": rng.integers(0, 3, n),
        },
        index=[f"cell{i}" for i in range(n)],
    )
    file = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=GENES[name]))
    file.layers["log"] = counts.log1p()
    if name == "first":
        file.obsm["proteins"] = pd.DataFrame(rng.poisson(5, (n, 2)), index=obs.index, columns=["CD3", "CD19"])
    return file


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """70 cells in a snapshot."""
    catalog = create_catalog(Location(str(tmp_path_factory.mktemp("loader") / "atlas")))
    add(catalog, make_file("first", 40, 1), {"name": "first", "spaces": {"obsm/proteins": "protein_abundance"}}, False)
    add(catalog, make_file("second", 30, 2), {"name": "second"}, False)
    query = Query(catalog.at(snapshot(catalog)))
    result = query.to_anndata()
    return Small(query, result.X.toarray(), result.obs)


@pytest.fixture
def mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write even few cells to files, and return their folder."""
    monkeypatch.setattr(cells, "IN_MEMORY_CELLS", 0)
    monkeypatch.setenv("RAGGEDATLAS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "raggedatlas" / "plans"
