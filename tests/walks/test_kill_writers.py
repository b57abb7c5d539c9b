"""Processes killed at any moment of any writing call lose and double nothing; scripts/kill_writers does this 200 times."""

from pathlib import Path

import pytest

from campaigns.kill_campaign import CALLS, Campaign
from raggedatlas.atlas import RaggedAtlas
from raggedatlas.query.identity import FeatureIdentity

READING = {"open", "checkout", "checkout_latest", "query", "explain", "history", "orthologs", "status", "tables"}

OTHERS = {"map_terms", "sync", "publish", "drop_asset", "relink"}
"""Calls that write nothing in the atlas but by `annotate`, that write elsewhere (tests/catalog/test_mirror.py, test_published.py), what `drop_result` and `drop_geometry` do, and `relink` (tests/ingest/test_relink.py)."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:lance is not fork-safe")
def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """After each kill the atlas equals a model of it, with what was added since, in all its snapshots."""
    campaign = Campaign(tmp_path, seed=1)
    for _ in range(4):
        campaign.step()
    assert campaign.kills.total() + campaign.finished.total() == 4


def test_every_writing_call_is_in_the_campaign() -> None:
    """What an atlas and its feature identity offer either reads or is called by name in the campaign."""
    offered = {name for name in vars(RaggedAtlas) if not name.startswith("_")}
    offered |= {f"identity.{name}" for name in vars(FeatureIdentity) if not name.startswith("_")}
    assert {name for name in offered if name.removeprefix("identity.") not in READING} <= {*CALLS, *OTHERS}
