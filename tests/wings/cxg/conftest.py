"""Fixtures of the tests of CXG, which need tiledb."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from support.cxg_files import write_cxg

collect_ignore_glob = [] if find_spec("tiledb") else ["test_*.py"]


@pytest.fixture
def cxg(tmp_path: Path) -> Path:
    """A CXG 0.3.0 with Xr and Xc."""
    return write_cxg(tmp_path / "x.cxg")
