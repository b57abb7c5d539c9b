"""A small atlas of two datasets that do not share their genes, and what a query of it gives."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray

from raggedatlas import Query, ResultDataset, ResultDatasetWriter
from raggedatlas.catalog.catalog import create_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.ingest.add import add
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
    rng = np.random.default_rng(seed)
    counts = sp.csr_matrix(rng.poisson(0.8, (n, len(GENES[name]))).astype(np.float32))
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(rng.choice(["B", "T", None], n), categories=["T", "B"]),
            "tissue": rng.choice(["lung", "blood"], n),
            "score": np.where(rng.random(n) < 0.2, np.nan, rng.random(n)),
        },
        index=[f"cell{i}" for i in range(n)],
    )
    file = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=GENES[name]))
    file.obsm["X_z"] = rng.normal(size=(n, 4)).astype(np.float32)
    return file


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """73 cells in a snapshot."""
    folder = tmp_path_factory.mktemp("verbs") / "atlas"
    catalog = create_catalog(Location(str(folder)))
    for name, n in (("first", 40), ("second", 33)):
        add(catalog, make_file(name, n, n), {"name": name, "spaces": {"obsm/X_z": "embedding"}}, False)
    query = Query(catalog.at(snapshot(catalog)))
    result = query.to_anndata()
    return Small(folder, query, result.X.toarray().astype(np.float32), result.obs)


Write = Callable[..., ResultDataset]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write results of one output to a new folder."""

    def write_results(values: Any, ids: list[str] | None = None) -> ResultDataset:
        folder = tmp_path / f"results-{len(list(tmp_path.iterdir()))}"
        with ResultDatasetWriter(folder) as writer:
            writer.write_batch([f"{i:016x}" for i in range(len(values))] if ids is None else ids, values)
        return ResultDataset({}, folder)

    return write_results
