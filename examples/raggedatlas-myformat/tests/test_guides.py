"""The tests that raggedatlas has for every format, run for ``.guides``."""

from collections.abc import Callable
from pathlib import Path

import pytest
from raggedatlas_myformat.guides import GuideSink, GuideSource

from raggedatlas.testing.conformance import SinkTests, SourceTests


class TestGuideSource(SourceTests):
    """Reading."""

    @pytest.fixture
    def open_source(self, tmp_path: Path) -> Callable[[], GuideSource]:
        path = tmp_path / "screen.guides"
        path.write_text("AAAC-1\tguide2\t3\nAAAC-1\tguide1\t1\nAAAG-1\tguide2\t5\n")
        return lambda: GuideSource(path)


class TestGuideSink(SinkTests):
    """Writing."""

    suffix = ".guides"

    @pytest.fixture
    def new_sink(self) -> type[GuideSink]:
        return GuideSink
