"""The measurement of reading and writing h5ad, once at small size: every operation runs, and both systems agree."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import anndata_io
import ours_anndata_io
import peer_anndata
import pytest
from measuring import Asked, Figure

MEASURES = {anndata_io.OURS: ours_anndata_io.MEASURES, anndata_io.THEIRS: peer_anndata.MEASURES}


@pytest.fixture
def sitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> anndata_io.Sitting:
    """A sitting over a few cells, all in this process."""

    def here(system: Any, op: str, campaign: Any, atlas: Path, setting: dict[str, Any]) -> dict[str, Any]:
        figure = Figure(system.name, op, peak_anon_rss_mb=1.0, process_cpu_seconds=1.0)
        MEASURES[system.name][op](Asked(op, campaign.data, atlas, campaign.repeats, dict(setting)), figure)
        return asdict(figure)

    monkeypatch.setattr(anndata_io, "measure", here)
    monkeypatch.setattr(anndata_io, "MAIN", 0.002)
    return anndata_io.sit([0.001, 0.002], 1, 1, tmp_path, [])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_operation_of_both_systems_runs_and_agrees(sitting: anndata_io.Sitting) -> None:
    """Each goal has a figure, nothing failed, the two read the same values, and what we validate has no fault."""
    assert not sitting.failures
    assert not anndata_io.disagreements(sitting)
    lines = anndata_io.goals(sitting)
    assert len(lines) == 2 + len(anndata_io.TARGETS) + 1 + len(anndata_io.GROWING)
    assert not any("not measured" in line for line in lines)
    checked = [m for m in anndata_io.COMPARED if m.op == "validate"]
    assert [f["answer"]["problems"] for m in checked for f in sitting.figures[0.002][m.key]] == [0, 0]
    page = anndata_io.page(sitting, 1, 1)
    assert "Both systems read the same values." in page
    assert all(f"| {m.label} | {m.system} |" in page for m in anndata_io.COMPARED)
