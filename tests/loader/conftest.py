"""A small atlas of two datasets, and a folder for the plans of loaders."""

from pathlib import Path

import pytest

from raggedatlas.loader import cells
from support.small import Small, make_small


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """70 cells in a snapshot."""
    return make_small(tmp_path_factory.mktemp("loader") / "atlas", 40, 30)


@pytest.fixture
def mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write even few cells to files, and return their folder."""
    monkeypatch.setattr(cells, "IN_MEMORY_CELLS", 0)
    monkeypatch.setenv("RAGGEDATLAS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "raggedatlas" / "plans"
