"""Every built-in format passes the tests that `raggedatlas.testing.conformance` has for formats of other packages."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import raggedatlas as ra
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.model.protocols import Sink, Source
from raggedatlas.testing.conformance import SinkTests, SourceTests
from support.atlases import small_anndata
from support.cxg_files import write_cxg

DATA = Path(__file__).parent.parent / "data"


def in_memory(_: Path) -> Any:
    return small_anndata(1, 9)


def written(suffix: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Path:
        path = folder / f"x{suffix}"
        ra.copy(small_anndata(1, 9), path)
        return path

    return make


SOURCES: dict[str, Callable[[Path], Any]] = {
    "AnnData": in_memory,
    "h5ad": written(".h5ad"),
    "zarr": written(".zarr"),
    "10x": lambda _: DATA / "lung_C144.h5",
    "MuData": lambda _: DATA / "wu2020.h5mu",
    "CXG": lambda folder: write_cxg(folder / "x.cxg"),
}


class TestSources(SourceTests):
    """All sources."""

    @pytest.fixture(params=SOURCES)
    def open_source(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Source]:
        what = SOURCES[request.param](tmp_path)
        return lambda: open_source(what)


class TestH5ad(SinkTests):
    """Files of AnnData."""

    suffix = ".h5ad"

    @pytest.fixture
    def new_sink(self) -> Callable[[Path], Sink]:
        return open_sink


class TestZarr(TestH5ad):
    """Folders of AnnData."""

    suffix = ".zarr"


class TestCxg(TestH5ad):
    """CXG."""

    suffix = ".cxg"

    @pytest.fixture
    def new_sink(self) -> Callable[[Path], Sink]:
        return partial(open_sink, compute_embedding="pca")
