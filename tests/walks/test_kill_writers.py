"""Processes killed at any moment of any writing call lose and double nothing; scripts/kill_writers does this 200 times."""

from pathlib import Path

import pytest

from raggedatlas.testing.killing import Campaign


@pytest.mark.filterwarnings("ignore:lance is not fork-safe")
def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """After each kill the atlas equals a model of it, with what was added since, in all its snapshots."""
    campaign = Campaign(tmp_path, seed=1)
    for _ in range(4):
        campaign.step()
    assert campaign.kills.total() > 0
