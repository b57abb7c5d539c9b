"""A small atlas of two datasets, and results that belong to no atlas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raggedatlas import ResultDataset, ResultDatasetWriter
from support.small import Small, make_small


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """73 cells in a snapshot."""
    return make_small(tmp_path_factory.mktemp("verbs") / "atlas", 40, 33)


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
