"""Each measured operation as a pytest-benchmark test, on small made data.

``pytest benchmarks --benchmark-only`` measures; plain ``pytest benchmarks`` runs every operation
once and checks its answer, so that the measurements cannot rot.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
from compare import child_environment
from maker import Made, Recipe, make

import raggedatlas as ra

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

SMALL = Recipe(cells=400, genes=(3_000, 2_500, 2_000, 1_800), universe=3_000, cell_types=4, donors=2)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder, SMALL)
    return folder


@pytest.fixture(scope="session")
def made(data: Path) -> Made:
    return make(data, SMALL)


@pytest.fixture(scope="session")
def atlas_uri(data: Path, made: Made, tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("atlas") / "atlas")
    atlas = ra.RaggedAtlas.create(uri)
    for name in made.files:
        atlas.add(str(data / name))
    atlas.snapshot()
    return uri


@pytest.fixture(scope="session")
def view(atlas_uri: str) -> Any:
    return ra.RaggedAtlas.checkout_latest(atlas_uri)


def expected(data: Path, made: Made) -> list[ad.AnnData]:
    return [ad.read_h5ad(data / name) for name in made.files]


def test_maker_is_a_function_of_its_recipe(data: Path, tmp_path: Path) -> None:
    """The same recipe makes the same matrices, with rows sorted by local gene index."""
    make(tmp_path, SMALL)
    for first, again in zip(expected(data, make(data, SMALL)), expected(tmp_path, make(data, SMALL)), strict=True):
        np.testing.assert_array_equal(first.X.data, again.X.data)
        np.testing.assert_array_equal(first.X.indices, again.X.indices)
        assert first.X.has_canonical_format
        assert first.obs.equals(again.obs)


def test_add(benchmark: BenchmarkFixture, data: Path, made: Made, tmp_path: Path) -> None:
    """Adding a file and taking a snapshot keeps every cell."""
    numbers = iter(range(1_000_000))

    def fresh() -> tuple[tuple[Any], dict[str, Any]]:
        return (ra.RaggedAtlas.create(str(tmp_path / str(next(numbers)))),), {}

    def add(atlas: Any) -> Any:
        atlas.add(str(data / made.files[0]))
        return atlas, atlas.snapshot()

    atlas, version = benchmark.pedantic(add, setup=fresh, rounds=3)  # type: ignore[no-untyped-call]
    assert atlas.checkout(version).query().to_anndata().n_obs == made.cells[0]


def test_one_cell_type(benchmark: BenchmarkFixture, view: Any, data: Path, made: Made) -> None:
    """One cell type comes back with every count of its cells."""
    query = f"cell_type = '{made.cell_type}'"
    found = benchmark(lambda: view.query().where(query).to_anndata())
    sources = [a[a.obs["cell_type"] == made.cell_type] for a in expected(data, made)]
    assert found.n_obs == sum(a.n_obs for a in sources)
    assert found.X.sum() == sum(a.X.sum() for a in sources)


def test_few_genes(benchmark: BenchmarkFixture, view: Any, data: Path, made: Made) -> None:
    """Fifty genes over all cells come back in the asked order with every count."""
    found = benchmark(lambda: view.query().features(made.common_genes).to_anndata())
    sources = [a[:, made.common_genes] for a in expected(data, made)]
    assert found.shape == (sum(made.cells), len(made.common_genes))
    totals = sum(np.asarray(a.X.sum(axis=0)).ravel() for a in sources)
    np.testing.assert_array_equal(np.asarray(found.X.sum(axis=0)).ravel(), totals)


def test_counts(benchmark: BenchmarkFixture, view: Any, data: Path, made: Made) -> None:
    """Group counts add up to the number of cells."""
    from ours import counted_cells

    counted = benchmark(lambda: counted_cells(view))
    assert sum(counted.values()) == sum(made.cells)
    assert len(counted) == SMALL.cell_types


def test_open(benchmark: BenchmarkFixture, atlas_uri: str) -> None:
    """The newest snapshot opens."""
    assert benchmark(lambda: ra.RaggedAtlas.checkout_latest(atlas_uri)) is not None


def test_import(benchmark: BenchmarkFixture) -> None:
    """The package imports in a fresh interpreter."""
    command = [sys.executable, "-c", "import raggedatlas"]
    done = benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: subprocess.run(command, env=child_environment(), check=False), rounds=3
    )
    assert done.returncode == 0
