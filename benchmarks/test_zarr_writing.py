"""The measurement of writing Zarr, once at small size: every operation runs, and the page has a figure for each."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import anndata_io
import ours_anndata_io
import peer_anndata
import pytest
import zarr_writing
from measuring import Asked, Figure

if TYPE_CHECKING:
    from pathlib import Path

MEASURES = {zarr_writing.OURS: ours_anndata_io.MEASURES, zarr_writing.THEIRS: peer_anndata.MEASURES}
SIZE = 0.001


@pytest.mark.filterwarnings("ignore")
def test_every_way_of_writing_runs_and_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing failed, each way has its own row, and what both systems write is compared."""

    def here(system: Any, op: str, campaign: Any, atlas: Path, setting: dict[str, Any]) -> dict[str, Any]:
        figure = Figure(system.name, op, peak_anon_rss_mb=1.0, process_cpu_seconds=1.0)
        MEASURES[system.name][op](Asked(op, campaign.data, atlas, campaign.repeats, dict(setting)), figure)
        figure.cpu_seconds = [max(seconds, 0.01) for seconds in figure.cpu_seconds]
        return asdict(figure)

    monkeypatch.setattr(anndata_io, "measure", here)
    sitting = zarr_writing.sit(SIZE, 1, 1, tmp_path)
    assert not sitting.failures
    page = zarr_writing.page(sitting, SIZE, 1, 1)
    assert "not measured" not in page
    assert all(f"| {m.label} | {m.system} |" in page for m in zarr_writing.COMPARED)
    alone = [line for line in zarr_writing.ratios(sitting, SIZE)[2:] if line.split("|")[-2].strip() == "-"]
    assert [line.split("|")[1].strip() for line in alone] == [f"{name} from an atlas" for name in zarr_writing.FORMATS]
