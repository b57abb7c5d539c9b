"""One empty atlas per test, and what "left exactly as it was" means."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raggedatlas.atlas import RaggedAtlas

Unchanged = Callable[[RaggedAtlas], contextlib.AbstractContextManager[None]]


def state_of(atlas: RaggedAtlas) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Every file of the Zarr store, and each table's version and number of rows."""
    catalog = atlas._catalog.tip()
    root = Path(catalog.arrays.uri.removeprefix("file://"))
    files = sorted(
        str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and len(p.relative_to(root).parts) > 1
    )
    tables = {
        name: (catalog.tables.version(name), catalog.tables.read(name).num_rows) for name in catalog.tables.names()
    }
    return files, tables


@pytest.fixture
def atlas(tmp_path: Path) -> RaggedAtlas:
    return RaggedAtlas.create(str(tmp_path / "atlas"))


@pytest.fixture
def unchanged() -> Unchanged:
    @contextlib.contextmanager
    def context(atlas: RaggedAtlas) -> Iterator[None]:
        before = state_of(atlas)
        yield
        assert state_of(atlas) == before

    return context
