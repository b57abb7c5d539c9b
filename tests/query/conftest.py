"""A small atlas of three datasets that do not share their genes, and the same content as plain frames."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.catalog.catalog import Catalog, create_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.ingest.add import add
from raggedatlas.query.query import Query
from raggedatlas.store.location import Location

GENES = {
    "first": ["CD3D", "MS4A1", "NKG7", "LYZ", "CD79A", "GNLY"],
    "second": ["LYZ", "CD79A", "FCGR3A", "MS4A1"],
    "third": ["GNLY", "PPBP", "LYZ", "MS4A1", "CD8A"],
}
PROTEINS = {"first": ["CD3", "CD19", "CD56"], "third": ["CD19", "CD4"]}


@dataclass(frozen=True, repr=False)
class Small:
    """The atlas at a snapshot, and what went in."""

    catalog: Catalog
    files: dict[str, ad.AnnData]

    @property
    def query(self) -> Query:
        return Query(self.catalog)

    @property
    def obs(self) -> pd.DataFrame:
        """All cells in table order, indexed by dataset and name."""
        parts = {
            name: file.obs.assign(dataset=name, cell_name=file.obs_names)
            .astype({"cell_type": object, "stage": object})
            .assign(n=file.obs["n"].astype(object) if "n" in file.obs else None)
            for name, file in self.files.items()
        }
        return pd.concat(parts, names=["of", "cell"])

    def values(self, dataset: str, layer: str) -> pd.DataFrame:
        """One layer of one dataset, cells by genes."""
        file = self.files[dataset]
        matrix = file.X if layer == "counts" else file.layers[layer]
        return pd.DataFrame(matrix.toarray(), index=file.obs_names, columns=file.var_names)


def make_file(name: str, n: int, seed: int) -> ad.AnnData:
    """Make one dataset: counts, a layer with the same entries, a layer with entries of its own, proteins, an embedding."""
    rng = np.random.default_rng(seed)
    genes = GENES[name]
    counts = sp.csr_matrix(rng.poisson(0.7, (n, len(genes))).astype(np.float32))
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(rng.choice(["B", "T", "NK", None], n), categories=["T", "B", "NK", "unused"]),
            "percent.mt": rng.random(n).astype(np.float32),
            "score": np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n).round(2)),
            "donor": rng.choice(["D1", "it's", "50%_`x`", None], n),
            "flag": pd.array(rng.choice([True, False, None], n), dtype="boolean"),
            "stage": pd.Categorical(rng.choice(["late", "early"], n), categories=["early", "late"], ordered=True),
        },
        index=[f"cell{i}" for i in range(n)],
    )
    if name != "third":
        obs["n"] = pd.array(rng.choice([-(2**63), -1, 0, 3, 2**63 - 1], n), dtype="int64")
    file = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=genes))
    file.layers["lognorm"] = counts.copy()
    file.layers["lognorm"].data = np.log1p(counts.data)
    file.layers["scaled"] = sp.csr_matrix(rng.normal(size=counts.shape).astype(np.float32))
    if name == "first":
        file.layers["only_here"] = counts.copy()
    if name in PROTEINS:
        proteins = rng.poisson(5, (n, len(PROTEINS[name])))
        file.obsm["proteins"] = pd.DataFrame(proteins, index=file.obs_names, columns=PROTEINS[name])
    file.obsm["X_pca"] = rng.normal(size=(n, 3)).astype(np.float32)
    return file


def build(folder: Path, files: dict[str, ad.AnnData]) -> Catalog:
    """Add files to a new atlas, and give it at its tip."""
    catalog = create_catalog(Location(str(folder)))
    for name, file in files.items():
        spaces = {"obsm/X_pca": "embedding"} | ({"obsm/proteins": "protein_abundance"} if name in PROTEINS else {})
        add(catalog, file.copy(), {"name": name, "spaces": spaces}, False)
    return catalog


def freeze(catalog: Catalog) -> Query:
    """Take a snapshot, and query it."""
    return Query(catalog.at(snapshot(catalog)))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Three datasets in a snapshot."""
    files = {
        name: make_file(name, n, seed) for name, n, seed in (("first", 23, 1), ("second", 17, 2), ("third", 19, 3))
    }
    catalog = build(tmp_path_factory.mktemp("query") / "atlas", files)
    return Small(catalog.at(snapshot(catalog, "small")), files)


@pytest.fixture(scope="session")
def query(small: Small) -> Query:
    """A query of the small atlas without conditions."""
    return small.query


@pytest.fixture
def own(tmp_path: Path) -> tuple[Catalog, Callable[[Catalog], Query]]:
    """An atlas of two datasets that a test may change, and what takes a snapshot of it."""
    files = {name: make_file(name, n, seed) for name, n, seed in (("first", 9, 4), ("third", 8, 5))}
    return build(tmp_path / "atlas", files), freeze
