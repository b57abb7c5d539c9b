"""Make seeded, real-shaped datasets that do not share their genes, as plain h5ad files.

Four datasets measure 30,000 / 25,000 / 20,000 / 18,000 genes of one universe of 30,000, each in
an order of its own. Gene means are lognormal (sigma 2.0, and 0.8 more for each of 20 cell types),
library sizes lognormal (median 3,600 to 5,200 counts, sigma 0.5), counts Poisson given the
library size.

Run ``python benchmarks/maker.py OUT --cells 50000 --seed 0``.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import h5py
    from numpy.typing import NDArray

MANIFEST = "manifest.json"
ONE = "dataset1.h5ad"
"""The one dataset for systems that are measured on one."""
EXPECTED_NNZ_PER_CELL = 2336
_BLOCK = 2_000
_HDF5_CHUNK = 1 << 18


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of the made files.

    Parameters
    ----------
    cells
        Cells per dataset.
    seed
        Seed of every random draw.
    genes
        Number of genes of each dataset; one file is made per entry.
    universe
        Number of genes to choose from.
    cell_types, donors
        Number of distinct values in the two categorical columns.
    sigma_gene, sigma_type, sigma_library
        Spread, in natural log units, of gene means, of cell type effects and of library sizes.
    library
        Median library size of each dataset.
    """

    cells: int = 5_000
    seed: int = 0
    genes: tuple[int, ...] = (30_000, 25_000, 20_000, 18_000)
    universe: int = 30_000
    cell_types: int = 20
    donors: int = 8
    sigma_gene: float = 2.0
    sigma_type: float = 0.8
    sigma_library: float = 0.5
    library: tuple[float, ...] = (5_200.0, 5_000.0, 5_000.0, 3_600.0)


@dataclass(frozen=True)
class Made:
    """What was written: one entry per file, and what the measuring scripts ask for."""

    recipe: Recipe
    files: list[str]
    cells: list[int]
    genes: list[int]
    nnz: list[int]
    max_count: float
    common_genes: list[str]
    cell_type: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def nnz_per_cell(self) -> float:
        """Mean number of non-zero counts of a cell, over all files."""
        return sum(self.nnz) / sum(self.cells)


@dataclass(frozen=True)
class Categorical:
    """Alias tables of one dataset: a draw costs two table look-ups whatever the number of genes.

    ``threshold`` and ``alias`` are (n_types, n_genes); ``threshold`` is scaled to 32 bits.
    """

    threshold: NDArray[np.uint32]
    alias: NDArray[np.int32]


@dataclass(frozen=True)
class Block:
    """Some consecutive cells: CSR parts (float32 counts, int32 sorted indices) and cell columns."""

    counts: NDArray[np.float32]
    indices: NDArray[np.int32]
    lengths: NDArray[np.int64]
    types: NDArray[np.int64]
    donors: NDArray[np.int64]


def gene_ids(recipe: Recipe) -> NDArray[np.str_]:
    """(universe,) Ensembl-like ids."""
    return np.array([f"ENSG{100_000 + i:011d}" for i in range(recipe.universe)])


def cell_type_names(recipe: Recipe) -> list[str]:
    """Names of the cell types, in code order."""
    return [f"type_{i:02d}" for i in range(recipe.cell_types)]


def universe_probabilities(recipe: Recipe) -> NDArray[np.float64]:
    """(cell_types, universe) relative gene means, not normalised."""
    rng = np.random.default_rng([recipe.seed, 0])
    gene = rng.normal(0.0, recipe.sigma_gene, recipe.universe)
    effect = rng.normal(0.0, recipe.sigma_type, (recipe.cell_types, recipe.universe))
    return np.asarray(np.exp(gene[None, :] + effect))


def dataset_genes(recipe: Recipe, dataset: int) -> NDArray[np.int64]:
    """Which genes a dataset measures, in its own order: (n_genes,) positions in the universe."""
    rng = np.random.default_rng([recipe.seed, 1, dataset])
    return rng.permutation(recipe.universe)[: recipe.genes[dataset]]


def alias_tables(weights: NDArray[np.float64]) -> Categorical:
    """Turn (n_types, n_genes) weights into alias tables (Vose's method)."""
    n_types, n_genes = weights.shape
    threshold = np.empty((n_types, n_genes), dtype=np.uint32)
    alias = np.empty((n_types, n_genes), dtype=np.int32)
    for row in range(n_types):
        share = weights[row] * (n_genes / weights[row].sum())
        cut, other = _alias_row(share)
        threshold[row] = np.minimum(cut * 2.0**32, 2.0**32 - 1).astype(np.uint32)
        alias[row] = other
    return Categorical(threshold, alias)


def _alias_row(share: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    left = share.tolist()
    other = list(range(len(left)))
    small = np.flatnonzero(share < 1.0).tolist()
    large = np.flatnonzero(share >= 1.0).tolist()
    while small and large:
        poor, rich = small.pop(), large[-1]
        other[poor] = rich
        left[rich] -= 1.0 - left[poor]
        if left[rich] < 1.0:
            small.append(large.pop())
    # What rounding leaves over has share one.
    for rest in (small, large):
        for gene in rest:
            left[gene] = 1.0
    return np.asarray(left), np.asarray(other, dtype=np.int32)


def draw_block(recipe: Recipe, dataset: int, start: int, tables: Categorical) -> Block:
    """Draw the cells ``start`` to ``start + 2,000``; a function of recipe, dataset and start only.

    The library size of a cell is drawn first, then its number of molecules (Poisson), then a gene
    for each molecule: the same law as one Poisson count per gene, at a cost that follows the
    counts.
    """
    rng = np.random.default_rng([recipe.seed, 2, dataset, start])
    n_cells = min(_BLOCK, recipe.cells - start)
    n_genes = tables.alias.shape[1]
    types = rng.integers(0, recipe.cell_types, n_cells)
    donors = rng.integers(0, recipe.donors, n_cells)
    median = recipe.library[dataset]
    totals = rng.poisson(median * np.exp(rng.normal(0.0, recipe.sigma_library, n_cells)))
    cells = np.repeat(np.arange(n_cells, dtype=np.uint32), totals)
    slot = rng.integers(0, n_genes, cells.size, dtype=np.int32)
    at = np.repeat(types.astype(np.int32) * n_genes, totals) + slot
    level = rng.integers(0, 2**32, cells.size, dtype=np.uint32)
    gene = np.where(level < tables.threshold.ravel()[at], slot, tables.alias.ravel()[at])
    keys = cells * np.uint32(n_genes) + gene.astype(np.uint32)
    keys.sort()
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    counts = np.diff(np.append(first, keys.size)).astype(np.float32)
    owner, indices = np.divmod(keys[first], np.uint32(n_genes))
    lengths = np.bincount(owner, minlength=n_cells).astype(np.int64)
    return Block(counts, indices.astype(np.int32), lengths, types, donors)


def blocks(recipe: Recipe, dataset: int) -> Iterator[Block]:
    """Draw one dataset block by block."""
    weights = universe_probabilities(recipe)[:, dataset_genes(recipe, dataset)]
    tables = alias_tables(weights)
    for start in range(0, recipe.cells, _BLOCK):
        yield draw_block(recipe, dataset, start, tables)


def open_matrix(group: h5py.Group, shape: tuple[int, int]) -> None:
    """Begin an empty CSR matrix of float32 counts and int32 indices; its row pointers come last."""
    group.attrs["encoding-type"] = "csr_matrix"
    group.attrs["encoding-version"] = "0.1.0"
    group.attrs["shape"] = np.asarray(shape, dtype=np.int64)
    for name, dtype in (("data", np.float32), ("indices", np.int32)):
        group.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=(_HDF5_CHUNK,))


def append(dataset: h5py.Dataset, values: NDArray[Any]) -> None:
    """Lengthen a one-dimensional dataset."""
    start = dataset.shape[0]
    dataset.resize((start + values.size,))
    dataset[start:] = values


def write_dataset(recipe: Recipe, dataset: int, path: Path) -> tuple[int, float]:
    """Write one h5ad file, holding one block of 2,000 cells at a time.

    Returns
    -------
    (nnz, max_count)
        Number of stored counts and the largest of them.
    """
    import h5py

    lengths: list[NDArray[np.int64]] = []
    types: list[NDArray[np.int64]] = []
    donors: list[NDArray[np.int64]] = []
    totals: list[NDArray[np.float64]] = []
    largest = 0.0
    with h5py.File(path, "w") as file:
        file.attrs["encoding-type"] = "anndata"
        file.attrs["encoding-version"] = "0.1.0"
        matrix = file.create_group("X")
        open_matrix(matrix, (recipe.cells, recipe.genes[dataset]))
        for block in blocks(recipe, dataset):
            append(matrix["data"], block.counts)
            append(matrix["indices"], block.indices)
            owner = np.repeat(np.arange(block.lengths.size), block.lengths)
            totals.append(np.bincount(owner, block.counts, block.lengths.size).astype(np.float64))
            lengths.append(block.lengths)
            types.append(block.types)
            donors.append(block.donors)
            largest = max(largest, float(block.counts.max(initial=0.0)))
        indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        # Real files store 32-bit row pointers while they fit.
        small = indptr[-1] < 2**31
        matrix.create_dataset("indptr", data=indptr.astype(np.int32 if small else np.int64))
        columns = (np.concatenate(types), np.concatenate(donors), np.concatenate(totals))
        _write_frames(file, recipe, dataset, columns)
    return int(indptr[-1]), largest


def _write_frames(
    file: h5py.File,
    recipe: Recipe,
    dataset: int,
    columns: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]],
) -> None:
    import pandas as pd
    from anndata.io import write_elem

    types, donors, totals = columns
    names = pd.Index(cell_type_names(recipe))
    people = pd.Index([f"donor_{i}" for i in range(recipe.donors)])
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical.from_codes(types, categories=names),
            "donor": pd.Categorical.from_codes(donors, categories=people),
            "n_counts": totals,
        },
        index=[f"d{dataset}-{i:07d}" for i in range(recipe.cells)],
    )
    chosen = dataset_genes(recipe, dataset)
    var = pd.DataFrame({"gene_symbol": [f"GENE{i}" for i in chosen]}, index=gene_ids(recipe)[chosen].astype(object))
    write_elem(file, "obs", obs)
    write_elem(file, "var", var)
    for name in ("obsm", "varm", "obsp", "varp", "layers", "uns"):
        write_elem(file, name, {})


def make(out: Path, recipe: Recipe) -> Made:
    """Write every dataset of a recipe and ``manifest.json`` into a folder.

    A folder that already holds this very recipe is left as it is.

    Raises
    ------
    FileExistsError
        If the folder holds files of another recipe.
    """
    if (out / MANIFEST).exists():
        made = read_manifest(out)
        if made.recipe == recipe:
            return made
        raise FileExistsError(f"{out} holds data of another recipe; choose another folder.")
    out.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    nnz: list[int] = []
    largest = 0.0
    for dataset in range(len(recipe.genes)):
        name = f"dataset{dataset}.h5ad"
        stored, top = write_dataset(recipe, dataset, out / name)
        files.append(name)
        nnz.append(stored)
        largest = max(largest, top)
    shared = set(range(recipe.universe))
    for dataset in range(len(recipe.genes)):
        shared &= set(dataset_genes(recipe, dataset).tolist())
    every = np.array(sorted(shared))
    picked = every[np.linspace(0, every.size - 1, min(50, every.size)).astype(int)]
    made = Made(
        recipe=recipe,
        files=files,
        cells=[recipe.cells] * len(files),
        genes=list(recipe.genes),
        nnz=nnz,
        max_count=largest,
        common_genes=gene_ids(recipe)[picked].tolist(),
        cell_type=cell_type_names(recipe)[min(3, recipe.cell_types - 1)],
    )
    (out / MANIFEST).write_text(json.dumps(asdict(made), indent=1))
    return made


def read_manifest(folder: Path) -> Made:
    """Read what :func:`make` noted next to its files."""
    raw = json.loads((folder / MANIFEST).read_text())
    recipe: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.pop("recipe").items()}
    return Made(recipe=Recipe(**recipe), **raw)


def main() -> None:
    """Make the files a command line asks for and print what they hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cells", type=int, default=5_000, help="cells per dataset (full: 50000)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started = time.perf_counter()
    made = make(asked.out, Recipe(cells=asked.cells, seed=asked.seed))
    for name, cells, genes, nnz in zip(made.files, made.cells, made.genes, made.nnz, strict=True):
        print(f"{name}: {cells:,} cells x {genes:,} genes, {nnz:,} nnz, {nnz / cells:,.0f} per cell")
    off = made.nnz_per_cell / EXPECTED_NNZ_PER_CELL - 1
    print(
        f"mean {made.nnz_per_cell:,.0f} nnz per cell ({off:+.1%} of the reference "
        f"{EXPECTED_NNZ_PER_CELL:,}), largest count {made.max_count:,.0f}, "
        f"{time.perf_counter() - started:.1f} s"
    )


if __name__ == "__main__":
    main()
