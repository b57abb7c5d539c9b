"""The measurement of geometry, once at small size: what we write and read against Parquet, and the page."""

from __future__ import annotations

from pathlib import Path

import vectors
import vectors_worker


def test_every_operation_runs_and_answers_agree(tmp_path: Path) -> None:
    """Each operation of the systems installed here has a figure; boxes hold the same points; each goal has a line."""
    figures: vectors.Figures = {}
    for what, (n, systems) in vectors.WHAT.items():
        for name in systems:
            if name == vectors.THEIRS or vectors.SYSTEMS[name].why_missing(name):
                continue
            figures[name, what] = vectors_worker.measure(name, what, tmp_path / f"{name}-{what}", n // 1000)
            assert figures[name, what]["write"] > 0
    ours = figures[vectors.OURS, "points"]
    assert ours["answer"] == figures[vectors.PARQUET, "points"]["answer"]
    assert {"box", "large", "opened", "decode"} <= set(ours)
    assert "one" in figures[vectors.OURS, "meshes"]
    page = vectors.page(figures, 0.001)
    assert "Points in the first box agree: yes." in page
    assert all(title in page for title, *_ in vectors.TARGETS)


def test_verdicts() -> None:
    """Lower and upper limits are reported in words."""
    assert vectors.verdict(None, 5, None, less=False) == "not measured"
    assert vectors.verdict(4, 5, 8, less=False) == "NOT REACHED"
    assert vectors.verdict(6, 5, 8, less=False) == "reached"
    assert vectors.verdict(9, 5, 8, less=False) == "reached, and the aim"
    assert vectors.verdict(9, 5, None, less=True) == "NOT REACHED"
