"""Two processes that write one atlas at the same moment; `scripts/race_calls` races all pairs of calls."""

from datetime import date
from pathlib import Path

import pytest

from campaigns.race_campaign import RACED, Campaign, calls_of

PAIRS = [
    ("purge", "snapshot"),
    ("rename_dataset", "rename_dataset"),
    ("drop_dataset", "rename_dataset"),
    ("annotate", "annotate"),
    ("add result", "delete_cells"),
    ("link geometry", "link geometry"),
]
"""The usual sample."""

OTHER_FORMS = {"create", "infer", "add by workers", "add several", "add transcripts"}
"""Calls of the campaign of kills that write no atlas that is there, or do what another call of the pairs does."""

pytestmark = pytest.mark.filterwarnings("ignore:lance is not fork-safe")


@pytest.mark.long
def test_either_order_explains_what_is_left(tmp_path: Path) -> None:
    """Both calls are done as if one came first, or one is refused for the other; readers see the snapshot that they opened."""
    campaign = Campaign(tmp_path)
    with campaign.processes() as pipes:
        for pair in PAIRS:
            campaign.race(pipes, pair)
    assert campaign.ended.total() == len(PAIRS)


@pytest.mark.long
@pytest.mark.parametrize(
    "pair",
    [
        ("drop_dataset", "restore"),
        ("delete_cells", "drop_dataset"),
        *(pytest.param((name, "purge"), marks=pytest.mark.nightly) for name in ("restore", "repair", "gc", "delete_cells")),
        *(pytest.param(("restore", name), marks=pytest.mark.nightly) for name in ("drop_dataset", "drop_geometry", "repair")),
        *(pytest.param((name, "restore"), marks=pytest.mark.nightly) for name in ("drop_geometry", "repair", "purge")),
    ],
    ids="-".join,
)  # fmt: skip
def test_a_call_between_the_commits_of_another(tmp_path: Path, pair: tuple[str, str]) -> None:
    """One of the two orders explains what is left, whatever another process does between two commits of a call."""
    campaign, commit = Campaign(tmp_path), 0
    with campaign.processes() as pipes:
        while campaign.interrupt(pipes, pair, commit):
            commit += 1
    assert commit > 1


@pytest.mark.long
def test_geometry_is_dropped_before_the_last_commits_of_restore(tmp_path: Path) -> None:
    """`restore` does not count pointers of a column that a drop has taken, which once made it fail."""
    campaign = Campaign(tmp_path)
    with campaign.processes() as pipes:
        made = [campaign.interrupt(pipes, ("restore", "drop_geometry"), commit) for commit in (5, 6)]
    assert made == [True, True]


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_all_pairs(tmp_path: Path) -> None:
    """Every pair of writing calls, at other moments each day: rare windows are found by many runs."""
    seed = date.today().toordinal()
    # The paths in the report of a failure show the seed for `scripts/race_calls`.
    folder = tmp_path / f"seed-{seed}"
    folder.mkdir()
    campaign = Campaign(folder, seed)
    with campaign.processes() as pipes:
        for pair in campaign.pairs():
            campaign.race(pipes, pair)


def test_every_writing_call_is_raced(tmp_path: Path) -> None:
    """The pairs have every call of the campaign of kills, apart from forms of the same call."""
    assert {*RACED} - OTHER_FORMS == {*calls_of(tmp_path, 0)}
